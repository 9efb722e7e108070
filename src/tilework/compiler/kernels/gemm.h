// Matrix products of our own (gemm.cpp).
#pragma once
#include <cstdint>

namespace tilework {

struct Operand {  // a matrix, `leading` floats from row to row; `transposed`: from column to column
  const float* data;
  int64_t leading;
  bool transposed;
};

// out[m][n] = alpha a[m][k] b[k][n] + beta out. False where a library is the better choice: nothing has been done then.
bool own_gemm(const Operand& a, const Operand& b, int64_t m, int64_t k, int64_t n, float* out, int64_t leading, float alpha, float beta);

}  // namespace tilework
