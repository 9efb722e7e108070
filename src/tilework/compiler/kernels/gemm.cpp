// Matrix products of our own, for processors with AVX-512 on which MKL does not use it (it asks for Intel's name, and computes with
// half of the lanes elsewhere). Compiled once a machine (toolchain.py) and linked to the programs that have products.
//
// The usual scheme: a block of `b` is packed into panels of kColumns columns that stay in the second-level cache, rows of `a` into
// panels of at most kRows that stay in the first; the innermost loop keeps kRows x kColumns sums in registers. Threads share the
// result out as a grid and need nothing of each other. Each sum is made in one order, whatever the number of threads.
#include "gemm.h"

#if defined(__AVX512F__)
#include <immintrin.h>
#include <omp.h>

#include <algorithm>
#include <cstdlib>
#include <new>

namespace tilework {
namespace {

constexpr int64_t kLanes = 16, kColumns = 2 * kLanes, kRows = 14;
constexpr int64_t kDeep = 256;          // of the sums, at a time
constexpr int64_t kWide = 16 * kColumns;  // of b, at a time: with kDeep half a megabyte
constexpr int64_t kFewPanels = 10;          // of rows: b is not packed for so few, unless it lies transposed
constexpr int64_t kWorthPacking = 1 << 17, kWorthAThread = 1 << 19;  // multiplications

struct Memory {  // of one thread: panels of both matrices
  float* data = static_cast<float*>(aligned_alloc(64, sizeof(float) * (kDeep * kWide + kDeep * kRows + kLanes)));
  Memory() {
    if (!data) throw std::bad_alloc();
  }
  ~Memory() { free(data); }
};

// 16 rows of `from`, `leading` apart, become 16 columns of `to`, whose rows are `width` apart. Writes 16 floats a row.
inline void turn(const float* from, int64_t leading, float* to, int64_t width, int rows, int columns) {
  __m512 r[16], t[16];
  const __mmask16 there = (1u << columns) - 1;
  for (int i = 0; i < 16; ++i) r[i] = i < rows ? _mm512_maskz_loadu_ps(there, from + i * leading) : _mm512_setzero_ps();
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
  }
  for (int i = 0; i < 16; i += 4)
    for (int half = 0; half < 2; ++half) {
      const __m512d low = _mm512_castps_pd(t[i + half]), high = _mm512_castps_pd(t[i + 2 + half]);
      r[i + 2 * half] = _mm512_castpd_ps(_mm512_unpacklo_pd(low, high));
      r[i + 2 * half + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(low, high));
    }
  for (int i = 0; i < 4; ++i) {
    const __m512 a = _mm512_shuffle_f32x4(r[i], r[i + 4], 0x88), b = _mm512_shuffle_f32x4(r[i], r[i + 4], 0xdd);
    const __m512 c = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0x88), d = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0xdd);
    t[i] = _mm512_shuffle_f32x4(a, c, 0x88);
    t[i + 8] = _mm512_shuffle_f32x4(a, c, 0xdd);
    t[i + 4] = _mm512_shuffle_f32x4(b, d, 0x88);
    t[i + 12] = _mm512_shuffle_f32x4(b, d, 0xdd);
  }
  for (int i = 0; i < columns; ++i) _mm512_storeu_ps(to + i * width, t[i]);
}

// to[0..depth)[0..width) from b's rows and columns; what lies beyond `columns` is 0
inline void pack_b(const Operand& b, int64_t row, int64_t column, int64_t depth, int64_t columns, float* to) {
  if (b.transposed) {
    for (int64_t c = 0; c < kColumns; c += kLanes)
      for (int64_t d = 0; d < depth; d += kLanes)
        turn(b.data + (column + c) * b.leading + row + d, b.leading, to + d * kColumns + c, kColumns,
             std::clamp<int64_t>(columns - c, 0, kLanes), std::min(kLanes, depth - d));
    return;
  }
  const __mmask16 first = columns >= kLanes ? 0xffff : (1u << columns) - 1;
  const __mmask16 second = columns <= kLanes ? 0 : (1u << (columns - kLanes)) - 1;
  const float* from = b.data + row * b.leading + column;
  for (int64_t d = 0; d < depth; ++d, from += b.leading, to += kColumns) {
    _mm512_store_ps(to, _mm512_maskz_loadu_ps(first, from));
    _mm512_store_ps(to + kLanes, _mm512_maskz_loadu_ps(second, from + kLanes));
  }
}

// to[0..depth)[0..rows); a row's 16 floats reach into the next row, which comes later
inline void pack_a(const Operand& a, int64_t row, int64_t column, int64_t depth, int rows, float* to) {
  if (!a.transposed) {
    for (int64_t d = 0; d < depth; d += kLanes)
      turn(a.data + row * a.leading + column + d, a.leading, to + d * rows, rows, rows, std::min(kLanes, depth - d));
    return;
  }
  const __mmask16 there = (1u << rows) - 1;
  const float* from = a.data + column * a.leading + row;
  for (int64_t d = 0; d < depth; ++d, from += a.leading, to += rows) _mm512_storeu_ps(to, _mm512_maskz_loadu_ps(there, from));
}

template <int ROWS>
void block(const float* a, const float* b, int64_t b_leading, int64_t depth, float* out, int64_t leading, int64_t columns, float alpha,
           float beta) {
  __m512 sum[ROWS][2];
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; ++r) sum[r][0] = sum[r][1] = _mm512_setzero_ps();
  for (int64_t d = 0; d < depth; ++d, a += ROWS, b += b_leading) {
    const __m512 left = _mm512_loadu_ps(b), right = _mm512_loadu_ps(b + kLanes);
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) {
      const __m512 x = _mm512_set1_ps(a[r]);
      sum[r][0] = _mm512_fmadd_ps(x, left, sum[r][0]);
      sum[r][1] = _mm512_fmadd_ps(x, right, sum[r][1]);
    }
  }
  const __m512 scale = _mm512_set1_ps(alpha), keep = _mm512_set1_ps(beta);
  const __mmask16 there[2] = {(__mmask16)(columns >= kLanes ? 0xffff : (1u << columns) - 1),
                              (__mmask16)(columns <= kLanes ? 0 : (1u << (columns - kLanes)) - 1)};
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; ++r)
    for (int half = 0; half < 2; ++half) {
      float* at = out + r * leading + half * kLanes;
      __m512 value = _mm512_mul_ps(sum[r][half], scale);
      if (beta != 0) value = _mm512_fmadd_ps(_mm512_maskz_loadu_ps(there[half], at), keep, value);
      _mm512_mask_storeu_ps(at, there[half], value);
    }
}

using Block = void (*)(const float*, const float*, int64_t, int64_t, float*, int64_t, int64_t, float, float);
constexpr Block kBlocks[] = {nullptr,   block<1>, block<2>, block<3>,  block<4>,  block<5>,  block<6>, block<7>,
                             block<8>, block<9>, block<10>, block<11>, block<12>, block<13>, block<14>};

// rows and columns [from, to) of the result, by one thread
void part(const Operand& a, const Operand& b, int64_t depth, float* out, int64_t leading, float alpha, float beta, int64_t row_from,
          int64_t row_to, int64_t column_from, int64_t column_to) {
  static thread_local Memory memory;
  float *packed_b = memory.data, *packed_a = memory.data + kDeep * kWide;
  const int64_t panels = (row_to - row_from + kRows - 1) / kRows;
  for (int64_t c = column_from; c < column_to; c += kWide) {
    const int64_t wide = std::min(kWide, column_to - c);
    for (int64_t d = 0; d < depth; d += kDeep) {
      const int64_t deep = std::min(kDeep, depth - d);
      const int64_t in_place = !b.transposed && panels <= kFewPanels ? wide / kColumns * kColumns : 0;  // read where it lies
      for (int64_t p = in_place; p < wide; p += kColumns)
        pack_b(b, d, c + p, deep, std::min(kColumns, wide - p), packed_b + p * deep);
      for (int64_t i = 0; i < panels; ++i) {  // rows as even as can be
        const int64_t r = row_from + (row_to - row_from) * i / panels, rows = row_from + (row_to - row_from) * (i + 1) / panels - r;
        pack_a(a, r, d, deep, rows, packed_a);
        for (int64_t p = 0; p < wide; p += kColumns) {
          const bool there = p < in_place;
          kBlocks[rows](packed_a, there ? b.data + d * b.leading + c + p : packed_b + p * deep, there ? b.leading : kColumns, deep,
                        out + r * leading + c + p, leading, std::min(kColumns, wide - p), alpha, d == 0 ? beta : 1.0f);
        }
      }
    }
  }
}

}  // namespace

bool own_gemm(const Operand& a, const Operand& b, int64_t m, int64_t k, int64_t n, float* out, int64_t leading, float alpha, float beta) {
  const int64_t row_panels = (m + kRows - 1) / kRows, column_panels = (n + kColumns - 1) / kColumns;
  const int64_t worth = m * n * k / kWorthAThread;
  const int most = omp_in_parallel() ? 1 : std::min<int64_t>({omp_get_max_threads(), worth + 1, row_panels * column_panels});
  int down = 1, across = 1;
  int64_t best = INT64_MAX;
  for (int i = 1; i <= most; ++i) {  // the grid whose largest share is smallest, and then the one that packs least
    const int64_t j = most / i, high = (row_panels + i - 1) / i, wide = (column_panels + j - 1) / j;
    const int64_t cost = high * wide * 64 + high + 2 * wide;
    if (cost < best) best = cost, down = i, across = j;
  }
  if (down * across == 1) {
    part(a, b, k, out, leading, alpha, beta, 0, m, 0, n);
    return true;
  }
#pragma omp parallel for schedule(static) num_threads(down * across)
  for (int i = 0; i < down * across; ++i) {
    const int64_t y = i / across, x = i % across;
    part(a, b, k, out, leading, alpha, beta, std::min(m, row_panels * y / down * kRows), std::min(m, row_panels * (y + 1) / down * kRows),
         std::min(n, column_panels * x / across * kColumns), std::min(n, column_panels * (x + 1) / across * kColumns));
  }
  return true;
}

}  // namespace tilework
#else
namespace tilework {
bool own_gemm(const Operand&, const Operand&, int64_t, int64_t, int64_t, float*, int64_t, float, float) { return false; }
}  // namespace tilework
#endif
