// Sums over all replicas in the middle of a program. replicas.cpp has the code; it is linked to programs that need it.
#pragma once
#include <cstdint>

namespace tilework {

// out = the sum of every replica's `in`; where nobody else has joined, `in` itself.
void over_replicas(float* out, const float* in, int64_t count);
void over_replicas(double* out, const double* in, int64_t count);

}  // namespace tilework
