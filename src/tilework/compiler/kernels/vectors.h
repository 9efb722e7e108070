// Vectors of floats, as wide as the machine has them. The generated loops use torch's; these are for our own kernels.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <stdexcept>

#if defined(__AVX512F__) || defined(__FMA__)
#include <immintrin.h>
#endif

namespace tilework {

#if defined(__AVX512F__)
constexpr int64_t kLanes = 16;
#elif defined(__AVX__)
constexpr int64_t kLanes = 8;
#else
constexpr int64_t kLanes = 4;
#endif
constexpr bool kManyRegisters = kLanes == 16;  // 32 vector registers instead of 16: larger blocks

typedef float Vec __attribute__((vector_size(kLanes * 4)));
typedef float LooseVec __attribute__((vector_size(kLanes * 4), aligned(4), may_alias));
typedef int32_t Ints __attribute__((vector_size(kLanes * 4)));

// Makes the compiler hold a vector in a register. Otherwise it loads it again for each use, which costs more than the use.
static inline void hold(Vec& v) {
#if defined(__AVX512F__)
  asm("" : "+v"(v));
#elif defined(__AVX__)
  asm("" : "+x"(v));
#endif
}

static inline Vec load(const float* p) { return *reinterpret_cast<const LooseVec*>(p); }
static inline void store(float* p, Vec v) { *reinterpret_cast<LooseVec*>(p) = v; }
static inline Vec all(float x) { return x - Vec{}; }

// a * b + c, rounded once where the machine can
static inline Vec fma(Vec a, Vec b, Vec c) {
#if defined(__AVX512F__)
  return (Vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  return (Vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}

// Sums of kLanes vectors at once: result[i] = sum of v[i]'s lanes. Pairs are added lane by lane, then halves, and so on.
static inline Vec sums(const Vec* v) {
  Vec now[kLanes];
  for (int64_t i = 0; i < kLanes; ++i) now[i] = v[i];
  Ints even, odd;
  for (int64_t i = 0; i < kLanes; ++i) even[i] = 2 * i, odd[i] = 2 * i + 1;
#pragma GCC unroll 8
  for (int64_t count = kLanes; count > 1; count /= 2)
#pragma GCC unroll 8
    for (int64_t i = 0; i < count / 2; ++i)
      now[i] = __builtin_shuffle(now[2 * i], now[2 * i + 1], even) + __builtin_shuffle(now[2 * i], now[2 * i + 1], odd);
  return now[0];
}

// Cuts COUNT into pieces of at most MOST, as even as can be, and calls f.template operator()<size>(start) for each.
template <int MOST, int64_t COUNT, class F>
static inline void pieces(F f) {
  constexpr int64_t number = (COUNT + MOST - 1) / MOST, size = COUNT / number, larger = COUNT % number;
  int64_t at = 0;
  if constexpr (larger > 0)
    for (int64_t i = 0; i < larger; ++i, at += size + 1) f.template operator()<size + 1>(at);
  for (int64_t i = larger; i < number; ++i, at += size) f.template operator()<size>(at);
}

// Memory that a kernel needs while it runs; kept for the next time, one a thread.
struct Scratch {
  float* data = nullptr;
  int64_t size = 0;
  float* take(int64_t floats) {
    if (size < floats) {
      free(data);
      data = static_cast<float*>(aligned_alloc(64, (floats * sizeof(float) + 63) / 64 * 64));
      size = data ? floats : 0;
      if (!data) throw std::bad_alloc();
    }
    return data;
  }
  ~Scratch() { free(data); }
};

// What went wrong inside a parallel loop, which must not throw. Programs ask after each kernel that can fail.
static std::atomic<const char*> failure{nullptr};

static inline void check() {
  if (const char* what = failure.exchange(nullptr)) throw std::runtime_error(what);
}

}  // namespace tilework
