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

// The larger, where `right` counts only if it is larger or not a number: torch's rule, so that the first maximum wins.
static inline Vec larger(Vec left, Vec right) { return (right > left) | (right != right) ? right : left; }

static inline void max_pool(float* out, const float* x, int64_t planes, int64_t h, int64_t w, int64_t oh, int64_t ow, int64_t kh,
                            int64_t kw, int64_t sh, int64_t sw, int64_t ph, int64_t pw) {
  const Pool v{planes, h, w, oh, ow, kh, kw, sh, sw, ph, pw};
  constexpr int64_t L = kLanes;
  Ints even, odd;
  for (int64_t i = 0; i < L; ++i) even[i] = 2 * i, odd[i] = 2 * i + 1;
#pragma omp parallel for if (planes * h * w >= kSerialPool) schedule(static)
  for (int64_t p = 0; p < planes; ++p)
    for (int64_t y = 0; y < oh; ++y) {
      float* to = out + (p * oh + y) * ow;
      int64_t ox = 0;
      if (v.halves()) {
        const float *a = x + (p * h + 2 * y) * w, *b = a + w;
        for (; ox + L <= ow; ox += L) {
          const Vec a0 = load(a + 2 * ox), a1 = load(a + 2 * ox + L), b0 = load(b + 2 * ox), b1 = load(b + 2 * ox + L);
          Vec best = larger(__builtin_shuffle(a0, a1, even), __builtin_shuffle(a0, a1, odd));
          best = larger(best, __builtin_shuffle(b0, b1, even));
          store(to + ox, larger(best, __builtin_shuffle(b0, b1, odd)));
        }
        for (; ox < ow; ++ox) {
          float best = a[2 * ox];
          for (const float next : {a[2 * ox + 1], b[2 * ox], b[2 * ox + 1]}) best = next > best || next != next ? next : best;
          to[ox] = best;
        }
        continue;
      }
      for (; ox < ow; ++ox) {
        float best = -__builtin_inff();
        for (int64_t i = 0; i < kh; ++i)
          for (int64_t j = 0; j < kw; ++j) {
            const int64_t row = y * sh - ph + i, column = ox * sw - pw + j;
            if (row < 0 || row >= h || column < 0 || column >= w) continue;
            const float next = x[(p * h + row) * w + column];
            best = next > best || next != next ? next : best;
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
  constexpr int64_t L = kLanes;
  Ints low, high;
  for (int64_t i = 0; i < L; ++i) {
    low[i] = i / 2 + (i % 2 ? L : 0);
    high[i] = L / 2 + i / 2 + (i % 2 ? L : 0);
  }
  Ints even, odd;
  for (int64_t i = 0; i < L; ++i) even[i] = 2 * i, odd[i] = 2 * i + 1;
  const bool whole = v.halves() && h == 2 * oh && w == 2 * ow;  // every element belongs to a window
#pragma omp parallel for if (planes * h * w >= kSerialPool) schedule(static)
  for (int64_t p = 0; p < planes; ++p) {
    if (!whole) memset(out + p * h * w, 0, h * w * sizeof(float));
    for (int64_t y = 0; y < oh; ++y) {
      const float *g = grad + (p * oh + y) * ow, *top = pooled + (p * oh + y) * ow;
      int64_t ox = 0;
      if (v.halves()) {
        const int64_t at = (p * h + 2 * y) * w;
        const float *a = x + at, *b = a + w;
        float *oa = out + at, *ob = oa + w;
        for (; ox + L <= ow; ox += L) {
          const Vec a0 = load(a + 2 * ox), a1 = load(a + 2 * ox + L), b0 = load(b + 2 * ox), b1 = load(b + 2 * ox + L);
          const Vec best = load(top + ox), given = load(g + ox), none = {};
          const Ints m0 = __builtin_shuffle(a0, a1, even) == best, m1 = (__builtin_shuffle(a0, a1, odd) == best) & ~m0;
          const Ints m2 = (__builtin_shuffle(b0, b1, even) == best) & ~(m0 | m1);
          const Ints m3 = ~(m0 | m1 | m2);
          const Vec g0 = m0 ? given : none, g1 = m1 ? given : none, g2 = m2 ? given : none, g3 = m3 ? given : none;
          store(oa + 2 * ox, __builtin_shuffle(g0, g1, low));
          store(oa + 2 * ox + L, __builtin_shuffle(g0, g1, high));
          store(ob + 2 * ox, __builtin_shuffle(g2, g3, low));
          store(ob + 2 * ox + L, __builtin_shuffle(g2, g3, high));
        }
        for (; ox < ow; ++ox) {
          const bool m0 = a[2 * ox] == top[ox], m1 = !m0 && a[2 * ox + 1] == top[ox], m2 = !m0 && !m1 && b[2 * ox] == top[ox];
          oa[2 * ox] = m0 ? g[ox] : 0;
          oa[2 * ox + 1] = m1 ? g[ox] : 0;
          ob[2 * ox] = m2 ? g[ox] : 0;
          ob[2 * ox + 1] = m0 || m1 || m2 ? 0 : g[ox];
        }
        continue;
      }
      for (; ox < ow; ++ox) {
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

}  // namespace tilework
