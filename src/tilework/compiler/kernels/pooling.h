// Maximum pooling with windows that do not overlap: stride at least the kernel, no dilation.
#pragma once
#include "vectors.h"

namespace tilework {

struct Pool {
  int64_t planes, h, w, oh, ow, kh, kw, sh, sw, ph, pw;
  bool halves() const { return kh == 2 && kw == 2 && sh == 2 && sw == 2 && ph == 0 && pw == 0; }
};

// Work below this many elements stays on the calling thread.
constexpr int64_t kSerialPool = 1 << 15;

template <int N>
struct LanesOf;
#define TILEWORK_LANES(n)                                                          \
  template <>                                                                      \
  struct LanesOf<n> {                                                              \
    typedef float V __attribute__((vector_size(n * 4)));                           \
    typedef float Loose __attribute__((vector_size(n * 4), aligned(4), may_alias)); \
    typedef int32_t I __attribute__((vector_size(n * 4)));                         \
  }
TILEWORK_LANES(4);
TILEWORK_LANES(8);
TILEWORK_LANES(16);
#undef TILEWORK_LANES

// Windows of 2 x 2 side by side, N of them at once. Elements are compared in the order of the window, and a later one counts
// only if it is larger or not a number: torch's rule.
template <int N>
struct Pairs {
  typedef typename LanesOf<N>::V V;
  typedef typename LanesOf<N>::Loose Loose;
  typedef typename LanesOf<N>::I I;
  static V read(const float* p) { return *reinterpret_cast<const Loose*>(p); }
  static void write(float* p, V v) { *reinterpret_cast<Loose*>(p) = v; }
  static V larger(V left, V right) { return (right > left) | (right != right) ? right : left; }
  // every second of 2 N floats, from p or from p + 1
  static V half(const float* p, int from) {
    I which;
    for (int i = 0; i < N; ++i) which[i] = 2 * i + from;
    return __builtin_shuffle(read(p), read(p + N), which);
  }
  static void pool(const float* a, const float* b, float* to) {
    write(to, larger(larger(larger(half(a, 0), half(a, 1)), half(b, 0)), half(b, 1)));
  }
  static void spread(V first, V second, float* to) {
    I low, high;
    for (int i = 0; i < N; ++i) low[i] = i / 2 + (i % 2 ? N : 0), high[i] = N / 2 + i / 2 + (i % 2 ? N : 0);
    write(to, __builtin_shuffle(first, second, low));
    write(to + N, __builtin_shuffle(first, second, high));
  }
  static void grad(const float* a, const float* b, const float* top, const float* given, float* oa, float* ob) {
    const V best = read(top), g = read(given), none = {};
    const I m0 = half(a, 0) == best, m1 = (half(a, 1) == best) & ~m0, m2 = (half(b, 0) == best) & ~(m0 | m1), m3 = ~(m0 | m1 | m2);
    spread(m0 ? g : none, m1 ? g : none, oa);
    spread(m2 ? g : none, m3 ? g : none, ob);
  }
};

// Calls f<N>(x) so that blocks of N windows cover a row. The last block may overlap the one before it: both write the same there.
template <int N, class F>
static inline void blocks_of(int64_t count, F f) {
  for (int64_t x = 0; x + N <= count; x += N) f.template operator()<N>(x);
  if (count % N) f.template operator()<N>(count - N);
}

static inline void pool_row(const float* a, const float* b, int64_t ow, float* to) {
  const auto block = [=]<int N>(int64_t x) { Pairs<N>::pool(a + 2 * x, b + 2 * x, to + x); };
  if (ow >= kLanes) return blocks_of<kLanes>(ow, block);
  if (ow >= 8) return blocks_of<8>(ow, block);
  if (ow >= 4) return blocks_of<4>(ow, block);
  for (int64_t x = 0; x < ow; ++x) {
    float best = a[2 * x];
    for (const float next : {a[2 * x + 1], b[2 * x], b[2 * x + 1]}) best = (next > best) | (next != next) ? next : best;
    to[x] = best;
  }
}

static inline void pool_row_grad(const float* a, const float* b, const float* top, const float* g, int64_t ow, float* oa, float* ob) {
  const auto block = [=]<int N>(int64_t x) { Pairs<N>::grad(a + 2 * x, b + 2 * x, top + x, g + x, oa + 2 * x, ob + 2 * x); };
  if (ow >= kLanes) return blocks_of<kLanes>(ow, block);
  if (ow >= 8) return blocks_of<8>(ow, block);
  if (ow >= 4) return blocks_of<4>(ow, block);
  for (int64_t x = 0; x < ow; ++x) {
    const bool m0 = a[2 * x] == top[x], m1 = !m0 & (a[2 * x + 1] == top[x]), m2 = !m0 & !m1 & (b[2 * x] == top[x]);
    oa[2 * x] = m0 ? g[x] : 0;
    oa[2 * x + 1] = m1 ? g[x] : 0;
    ob[2 * x] = m2 ? g[x] : 0;
    ob[2 * x + 1] = m0 | m1 | m2 ? 0 : g[x];
  }
}

static inline void max_pool(float* out, const float* x, int64_t planes, int64_t h, int64_t w, int64_t oh, int64_t ow, int64_t kh,
                            int64_t kw, int64_t sh, int64_t sw, int64_t ph, int64_t pw) {
  const Pool v{planes, h, w, oh, ow, kh, kw, sh, sw, ph, pw};
#pragma omp parallel for if (planes * h * w >= kSerialPool) schedule(static)
  for (int64_t p = 0; p < planes; ++p)
    for (int64_t y = 0; y < oh; ++y) {
      float* to = out + (p * oh + y) * ow;
      if (v.halves()) {
        const float* a = x + (p * h + 2 * y) * w;
        pool_row(a, a + w, ow, to);
        continue;
      }
      for (int64_t ox = 0; ox < ow; ++ox) {
        float best = -__builtin_inff();
        for (int64_t i = 0; i < kh; ++i)
          for (int64_t j = 0; j < kw; ++j) {
            const int64_t row = y * sh - ph + i, column = ox * sw - pw + j;
            if (row < 0 || row >= h || column < 0 || column >= w) continue;
            const float next = x[(p * h + row) * w + column];
            best = (next > best) | (next != next) ? next : best;
          }
        to[ox] = best;
      }
    }
}

// The gradient goes to the first element of a window that equals its maximum, as torch has it. (Where the maximum is not a
// number, torch takes the last such element; here it is one of the window's, and everything is lost anyway.)
static inline void max_pool_grad(float* out, const float* grad, const float* x, const float* pooled, int64_t planes, int64_t h,
                                 int64_t w, int64_t oh, int64_t ow, int64_t kh, int64_t kw, int64_t sh, int64_t sw, int64_t ph,
                                 int64_t pw) {
  const Pool v{planes, h, w, oh, ow, kh, kw, sh, sw, ph, pw};
  const bool whole = v.halves() && h == 2 * oh && w == 2 * ow;  // every element belongs to a window
#pragma omp parallel for if (planes * h * w >= kSerialPool) schedule(static)
  for (int64_t p = 0; p < planes; ++p) {
    if (!whole) memset(out + p * h * w, 0, h * w * sizeof(float));
    for (int64_t y = 0; y < oh; ++y) {
      const float *g = grad + (p * oh + y) * ow, *top = pooled + (p * oh + y) * ow;
      if (v.halves()) {
        const int64_t at = (p * h + 2 * y) * w;
        pool_row_grad(x + at, x + at + w, top, g, ow, out + at, out + at + w);
        continue;
      }
      for (int64_t ox = 0; ox < ow; ++ox) {
        int64_t chosen = -1;
        for (int64_t i = 0; i < kh; ++i)
          for (int64_t j = 0; j < kw; ++j) {
            const int64_t row = y * sh - ph + i, column = ox * sw - pw + j;
            if (row < 0 || row >= h || column < 0 || column >= w) continue;
            const float next = x[(p * h + row) * w + column];
            if (next != next || (chosen < 0 && next == top[ox])) chosen = row * w + column;
          }
        if (chosen >= 0) out[p * h * w + chosen] = g[ox];
      }
    }
  }
}

// ---- the same with channels last: [n][h][w][c], vectors run along the channels ----

template <class F>
static inline void windows(int64_t n, int64_t oh, int64_t ow, int64_t work, F f) {
#pragma omp parallel for if (work >= kSerialPool) schedule(static)
  for (int64_t row = 0; row < n * oh; ++row)
    for (int64_t x = 0; x < ow; ++x) f(row / oh, row % oh, x);
}

static inline void max_pool_last(float* out, const float* x, int64_t n, int64_t c, int64_t h, int64_t w, int64_t oh, int64_t ow,
                                 int64_t kh, int64_t kw, int64_t sh, int64_t sw, int64_t ph, int64_t pw) {
  windows(n, oh, ow, n * c * h * w, [=](int64_t image, int64_t y, int64_t ox) {
    float* to = out + ((image * oh + y) * ow + ox) * c;
    for (int64_t k = 0; k < c; ++k) to[k] = -__builtin_inff();
    for (int64_t i = 0; i < kh; ++i)
      for (int64_t j = 0; j < kw; ++j) {
        const int64_t row = y * sh - ph + i, column = ox * sw - pw + j;
        if (row < 0 || row >= h || column < 0 || column >= w) continue;
        const float* from = x + ((image * h + row) * w + column) * c;
        int64_t k = 0;
        for (; k + kLanes <= c; k += kLanes) store(to + k, Pairs<kLanes>::larger(load(to + k), load(from + k)));
        for (; k < c; ++k) to[k] = (from[k] > to[k]) | (from[k] != from[k]) ? from[k] : to[k];
      }
  });
}

// Windows do not overlap, so each element has one writer. What no window covers is zeroed first.
static inline void max_pool_grad_last(float* out, const float* grad, const float* x, const float* pooled, int64_t n, int64_t c,
                                      int64_t h, int64_t w, int64_t oh, int64_t ow, int64_t kh, int64_t kw, int64_t sh, int64_t sw,
                                      int64_t ph, int64_t pw) {
  if (!(sh == kh && sw == kw && h == oh * kh && w == ow * kw)) memset(out, 0, n * c * h * w * sizeof(float));
  windows(n, oh, ow, n * c * h * w, [=](int64_t image, int64_t y, int64_t ox) {
    const int64_t at = ((image * oh + y) * ow + ox) * c;
    for (int64_t k = 0; k < c; k += kLanes) {
      const int64_t count = std::min(kLanes, c - k);
      float top[kLanes] = {}, given[kLanes] = {};  // a last piece of channels is padded
      memcpy(top, pooled + at + k, count * sizeof(float));
      memcpy(given, grad + at + k, count * sizeof(float));
      const Vec best = load(top), g = load(given), none = {};
      Ints open = ~Ints{};  // lanes whose maximum has not been met yet
      for (int64_t i = 0; i < kh; ++i)
        for (int64_t j = 0; j < kw; ++j) {
          const int64_t row = y * sh - ph + i, column = ox * sw - pw + j;
          if (row < 0 || row >= h || column < 0 || column >= w) continue;
          const int64_t from = ((image * h + row) * w + column) * c + k;
          if (count == kLanes) {
            const Vec v = load(x + from);
            const Ints here = ((v == best) | (v != v)) & open;
            store(out + from, here ? g : none);
            open &= ~here;
          } else {
            for (int64_t l = 0; l < count; ++l) {
              const bool here = ((x[from + l] == top[l]) | (x[from + l] != x[from + l])) & (open[l] != 0);
              out[from + l] = here ? given[l] : 0.0f;
              if (here) open[l] = 0;
            }
          }
        }
    }
  });
}

}  // namespace tilework
