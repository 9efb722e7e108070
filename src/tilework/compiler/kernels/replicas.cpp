// See replicas.h. How the numbers travel is not known here: whoever joins others hands in a function (compiler/exchange.cpp).
#include "replicas.h"

#include <cstddef>
#include <cstring>
#include <stdexcept>

namespace {

using Sum = int (*)(void* whom, void* data, int64_t count, int is_double, char* error, size_t size);  // in place; 0: done
Sum sum = nullptr;
void* whom = nullptr;

template <class T>
void total(T* out, const T* in, int64_t count) {
  memmove(out, in, count * sizeof(T));
  char error[512] = "";
  if (sum && sum(whom, out, count, sizeof(T) == sizeof(double), error, sizeof(error))) throw std::runtime_error(error);
}

}  // namespace

namespace tilework {
void over_replicas(float* out, const float* in, int64_t count) { total(out, in, count); }
void over_replicas(double* out, const double* in, int64_t count) { total(out, in, count); }
}  // namespace tilework

extern "C" __attribute__((visibility("default"))) void tilework_sum_with(Sum function, void* with) { sum = function, whom = with; }
