// Matrix products: by loops of our own where one side is a vector, by gemm.cpp where that is faster than BLAS, else straight to BLAS.
#pragma once
#include "gemm.h"
#include "vectors.h"

extern "C" void sgemm_(const char*, const char*, const int*, const int*, const int*, const float*, const float*, const int*,
                       const float*, const int*, const float*, float*, const int*);

// MKL's own setting of threads for the calling thread; null where BLAS is another library.
extern "C" __attribute__((weak)) int MKL_Set_Num_Threads_Local(int);

namespace tilework {

// Below this many multiplications a product runs on the calling thread alone: waking others costs more than it brings, and
// very much more where they have to wait for a core.
constexpr int64_t kSerialProduct = 1 << 20;
// The same for a vector by a matrix, which is bound by reading the matrix.
constexpr int64_t kSerialVector = 1 << 17;

struct Matrix {  // rows x columns; `transposed`: columns lie one after the other in memory
  const float* data;
  int64_t rows, columns, leading;
  bool transposed;
};

// out = alpha a b + beta out, `out` row by row. BLAS counts by columns, so this is out^T = b^T a^T.
static inline void gemm(const Matrix& a, const Matrix& b, float* out, int64_t out_leading, float alpha, float beta) {
  if (own_gemm({a.data, a.leading, a.transposed}, {b.data, b.leading, b.transposed}, a.rows, a.columns, b.columns, out, out_leading,
               alpha, beta))
    return;
  int m = b.columns, n = a.rows, k = a.columns;
  int lda = a.leading, ldb = b.leading, ldc = out_leading;
  const bool alone = MKL_Set_Num_Threads_Local && (int64_t)m * n * k < kSerialProduct;
  const int before = alone ? MKL_Set_Num_Threads_Local(1) : 0;
  sgemm_(b.transposed ? "T" : "N", a.transposed ? "T" : "N", &m, &n, &k, &alpha, b.data, &ldb, a.data, &lda, &beta, out, &ldc);
  if (alone) MKL_Set_Num_Threads_Local(before);
}

// total[0..COUNT) = lanes of the dot products of x[k] with COUNT rows, which are `leading` apart; what k leaves over is not in it
template <int COUNT>
static inline void dots(const float* x, const float* rows, int64_t leading, int64_t k, Vec* total) {
  constexpr int64_t L = kLanes;
  Vec one[COUNT] = {}, two[COUNT] = {};
  int64_t i = 0;
  for (; i + 2 * L <= k; i += 2 * L) {
    Vec v = load(x + i), w = load(x + i + L);
    hold(v), hold(w);
#pragma GCC unroll 8
    for (int r = 0; r < COUNT; ++r) {
      one[r] = fma(v, load(rows + r * leading + i), one[r]);
      two[r] = fma(w, load(rows + r * leading + i + L), two[r]);
    }
  }
  if (i + L <= k) {
    Vec v = load(x + i);
    hold(v);
#pragma GCC unroll 8
    for (int r = 0; r < COUNT; ++r) one[r] = fma(v, load(rows + r * leading + i), one[r]);
  }
  for (int r = 0; r < COUNT; ++r) total[r] = one[r] + two[r];
}

// out[0..count) = dot products of x[k] with `count` rows, at most kLanes
static inline void dot_rows(const float* x, const float* rows, int64_t leading, int64_t k, int64_t count, float* out) {
  Vec total[kLanes] = {};
  float found[kLanes];
  int64_t r = 0;
  for (; r + 4 <= count; r += 4) dots<4>(x, rows + r * leading, leading, k, total + r);
  for (; r < count; ++r) dots<1>(x, rows + r * leading, leading, k, total + r);
  store(found, sums(total));
  for (r = 0; r < count; ++r) {
    for (int64_t i = k / kLanes * kLanes; i < k; ++i) found[r] += x[i] * rows[r * leading + i];
    out[r] = found[r];
  }
}

// out[0..COUNT vectors) = sum over k of x[k] times the same piece of row k
template <int COUNT>
static inline void weighted(const float* x, const float* rows, int64_t leading, int64_t k, float* out) {
  constexpr int64_t L = kLanes;
  Vec total[COUNT] = {};
  for (int64_t i = 0; i < k; ++i) {
    const Vec v = all(x[i]);
#pragma GCC unroll 8
    for (int c = 0; c < COUNT; ++c) total[c] = fma(v, load(rows + i * leading + c * L), total[c]);
  }
  for (int c = 0; c < COUNT; ++c) store(out + c * L, total[c]);
}

// out[n] = x[k] times a matrix. by_rows: the matrix lies as [n][k], otherwise as [k][n]; `leading` floats from row to row.
// Each output is summed in one order, whatever the number of threads.
static inline void vector_product(float* out, const float* x, const float* matrix, int64_t k, int64_t n, int64_t leading, bool by_rows) {
  constexpr int64_t L = kLanes, kBlock = 4 * L;
  const bool parallel = k * n >= kSerialVector;
  if (by_rows) {
#pragma omp parallel for if (parallel) schedule(static)
    for (int64_t r = 0; r < n; r += kLanes) dot_rows(x, matrix + r * leading, leading, k, std::min(kLanes, n - r), out + r);
    return;
  }
#pragma omp parallel for if (parallel) schedule(static)
  for (int64_t block = 0; block < (n + kBlock - 1) / kBlock; ++block) {
    int64_t c = block * kBlock;
    if (c + kBlock <= n) {
      weighted<4>(x, matrix + c, leading, k, out + c);
      continue;
    }
    for (; c + L <= n; c += L) weighted<1>(x, matrix + c, leading, k, out + c);
    for (; c < n; ++c) {
      float total = 0;
      for (int64_t i = 0; i < k; ++i) total += x[i] * matrix[i * leading + c];
      out[c] = total;
    }
  }
}

// out[m][n] = a[m][k] b[k][n]; a and b may lie transposed
static inline void product(float* out, const float* a, const float* b, int64_t m, int64_t k, int64_t n, int64_t a_leading,
                           bool a_transposed, int64_t b_leading, bool b_transposed) {
  gemm({a, m, k, a_leading, a_transposed}, {b, k, n, b_leading, b_transposed}, out, n, 1.0f, 0.0f);
}

// weight[m][n] = keep weight - lr a[m][k] b[k][n]
static inline void update_by_product(float* weight, const float* a, const float* b, const float* lr, const float* keep, int64_t m,
                                     int64_t k, int64_t n, int64_t a_leading, bool a_transposed, int64_t b_leading, bool b_transposed) {
  gemm({a, m, k, a_leading, a_transposed}, {b, k, n, b_leading, b_transposed}, weight, n, -*lr, *keep);
}

// `count` products; the matrices of each operand are `a_step`, `b_step` floats apart
static inline void batch_product(float* out, const float* a, const float* b, int64_t count, int64_t m, int64_t k, int64_t n,
                                 int64_t a_step, int64_t a_leading, bool a_transposed, int64_t b_step, int64_t b_leading,
                                 bool b_transposed) {
  const bool parallel = count > 1 && count * m * k * n >= kSerialProduct && MKL_Set_Num_Threads_Local;
#pragma omp parallel for if (parallel) schedule(static)
  for (int64_t i = 0; i < count; ++i) {
    // Within the loop every thread has products of its own; MKL must not divide them further.
    const int before = parallel ? MKL_Set_Num_Threads_Local(1) : 0;
    gemm({a + i * a_step, m, k, a_leading, a_transposed}, {b + i * b_step, k, n, b_leading, b_transposed}, out + i * m * n, n, 1.0f,
         0.0f);
    if (parallel) MKL_Set_Num_Threads_Local(before);
  }
}

}  // namespace tilework
