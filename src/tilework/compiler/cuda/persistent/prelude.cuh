// What kernels of whole loops are written in terms of.

#ifndef TW_EMULATED
#define TW_SHARED extern __shared__ __align__(16) unsigned char shared[];

#ifdef TW_CLUSTER
// The blocks are one cluster, whose own barrier is several times faster than one through memory.
#define tw_grid_barrier(scratch, epoch) \
  asm volatile("barrier.cluster.arrive.release;\n\tbarrier.cluster.wait.acquire;" ::: "memory")
#else
// All blocks of the grid wait for each other. Only ever counted up: the kernel begins with zero.
#define tw_grid_barrier(scratch, epoch) tw_grid_barrier_((unsigned int*)(scratch), (epoch) += 1, gridDim.x)
__device__ static void tw_grid_barrier_(unsigned int* counter, unsigned int epoch, unsigned int blocks) {
  __syncthreads();
  if (threadIdx.x == 0) {
    asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
    unsigned int seen;
    do {
      asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(counter) : "memory");
    } while ((int)(seen - epoch * blocks) < 0);
  }
  __syncthreads();
}
#endif

// What another block may have written: not from this block's own cache.
template <typename T> __device__ static T tw_far(const T* p) { return __ldcg(p); }
template <> __device__ bool tw_far<bool>(const bool* p) { return __ldcg((const unsigned char*)p) != 0; }

// Bytes on their way into the block's memory, without a thread that waits for them. All of a thread's are there after tw_fetched().
__device__ static void tw_fetch(unsigned char* to, const unsigned char* from, int bytes, int thread, int threads) {
  const unsigned int place = (unsigned int)__cvta_generic_to_shared(to);
  for (int i = thread * 4; i < bytes; i += threads * 4)
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(place + i), "l"(from + i) : "memory");
}
__device__ static void tw_fetch_sent() { asm volatile("cp.async.commit_group;" ::: "memory"); }
__device__ static void tw_fetched() { asm volatile("cp.async.wait_group 0;" ::: "memory"); }

template <typename T> __device__ static T tw_swap(T x, int other) { return __shfl_xor_sync(0xffffffffu, x, other); }
template <> __device__ bool tw_swap<bool>(bool x, int other) { return __shfl_xor_sync(0xffffffffu, (int)x, other) != 0; }
#endif

struct TwSum { template <typename T> static __device__ T of(T a, T b) { return a + b; } };
struct TwProduct { template <typename T> static __device__ T of(T a, T b) { return a * b; } };
struct TwMax { template <typename T> static __device__ T of(T a, T b) { return (a > b || a != a) ? a : b; } };
struct TwMin { template <typename T> static __device__ T of(T a, T b) { return (a < b || a != a) ? a : b; } };
struct TwAny { template <typename T> static __device__ T of(T a, T b) { return a || b; } };

// The sum (or the like) over the `lanes` threads of a group, for all of them. Always in the same order.
template <int lanes, typename Op, typename T> __device__ static T tw_together(T x, T* partial) {
#pragma unroll
  for (int other = (lanes < 32 ? lanes : 32) / 2; other > 0; other /= 2) x = Op::of(x, tw_swap(x, other));
  if (lanes > 32) {
    const int warps = lanes / 32, warp = threadIdx.x / 32, first = warp / warps * warps;
    __syncthreads();
    if (threadIdx.x % 32 == 0) partial[warp] = x;
    __syncthreads();
    x = partial[first];
    for (int i = 1; i < warps; ++i) x = Op::of(x, partial[first + i]);
  }
  return x;
}

__device__ static unsigned long long tw_next_seed(unsigned long long base, unsigned long long counter) {
  unsigned long long z = base + (counter + 1) * 0x9E3779B97F4A7C15ull;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return (z ^ (z >> 31)) & 0x7FFFFFFFFFFFFFFFull;
}

// An index from the data. One that is out of range is noted, and the first element taken.
__device__ static int tw_within(long long index, long long size, bool wraps, unsigned int* wrong) {
  if (wraps && index < 0) index += size;
  if (index < 0 || index >= size) {
    *wrong = 1;
    return 0;
  }
  return (int)index;
}

// C++ computes with whole numbers of 8 and 16 bits as int; here, as in torch, what does not fit wraps round.
template <typename A, typename B, typename R> __device__ static R tw_narrow(A, B, R x) { return x; }
__device__ static signed char tw_narrow(signed char, signed char, int x) { return (signed char)x; }
__device__ static unsigned char tw_narrow(unsigned char, unsigned char, int x) { return (unsigned char)x; }
__device__ static short tw_narrow(short, short, int x) { return (short)x; }
__device__ static unsigned short tw_narrow(unsigned short, unsigned short, int x) { return (unsigned short)x; }

__device__ static float tw_nan() { return nanf(""); }
__device__ static float tw_infinity() { return __int_as_float(0x7f800000); }
template <typename T> __device__ static T tw_worst_max() { return (T)-tw_infinity(); }
template <typename T> __device__ static T tw_worst_min() { return (T)tw_infinity(); }
template <> __device__ long long tw_worst_max<long long>() { return (long long)1 << 63; }
template <> __device__ long long tw_worst_min<long long>() { return ~((long long)1 << 63); }
template <> __device__ int tw_worst_max<int>() { return (int)0x80000000; }
template <> __device__ int tw_worst_min<int>() { return 0x7fffffff; }

#define TW_FUNCTION(name, f32, f64) \
  __device__ static float tw_##name(float x) { return f32(x); } \
  __device__ static double tw_##name(double x) { return f64(x); }
TW_FUNCTION(sqrt, sqrtf, sqrt) TW_FUNCTION(rsqrt, 1.0f / sqrtf, 1.0 / sqrt) TW_FUNCTION(exp, expf, exp)
TW_FUNCTION(exp2, exp2f, exp2) TW_FUNCTION(expm1, expm1f, expm1) TW_FUNCTION(log, logf, log) TW_FUNCTION(log1p, log1pf, log1p)
TW_FUNCTION(log2, log2f, log2) TW_FUNCTION(log10, log10f, log10) TW_FUNCTION(sin, sinf, sin) TW_FUNCTION(cos, cosf, cos)
TW_FUNCTION(tan, tanf, tan) TW_FUNCTION(tanh, tanhf, tanh) TW_FUNCTION(sinh, sinhf, sinh) TW_FUNCTION(cosh, coshf, cosh)
TW_FUNCTION(asin, asinf, asin) TW_FUNCTION(acos, acosf, acos) TW_FUNCTION(atan, atanf, atan) TW_FUNCTION(erf, erff, erf)
TW_FUNCTION(erfc, erfcf, erfc) TW_FUNCTION(floor, floorf, floor) TW_FUNCTION(ceil, ceilf, ceil)
TW_FUNCTION(trunc, truncf, trunc) TW_FUNCTION(round, rintf, rint) TW_FUNCTION(lgamma, lgammaf, lgamma)
#undef TW_FUNCTION
#define TW_FUNCTION(name, f32, f64) \
  __device__ static float tw_##name(float x, float y) { return f32(x, y); } \
  __device__ static double tw_##name(double x, double y) { return f64(x, y); }
TW_FUNCTION(pow, powf, pow) TW_FUNCTION(fmod, fmodf, fmod) TW_FUNCTION(atan2, atan2f, atan2) TW_FUNCTION(hypot, hypotf, hypot)
TW_FUNCTION(copysign, copysignf, copysign)
#undef TW_FUNCTION

template <typename T> __device__ static T tw_abs(T x) { return x < 0 ? -x : x == 0 ? (T)0 : x; }
template <typename T> __device__ static T tw_sigmoid(T x) { return (T)1 / ((T)1 + tw_exp(-x)); }
template <typename T> __device__ static T tw_maximum(T a, T b) { return (a > b || a != a) ? a : b; }
template <typename T> __device__ static T tw_minimum(T a, T b) { return (a < b || a != a) ? a : b; }
template <typename T> __device__ static T tw_relu(T x) { return x < 0 ? (T)0 : x; }
template <typename T> __device__ static T tw_square(T x) { return x * x; }
template <typename T> __device__ static T tw_reciprocal(T x) { return (T)1 / x; }
template <typename T> __device__ static bool tw_isnan(T x) { return x != x; }
template <typename T> __device__ static bool tw_isinf(T x) { return x == (T)tw_infinity() || x == (T)-tw_infinity(); }
template <typename T> __device__ static T tw_sign(T x) { return (T)((x > 0) - (x < 0)); }
__device__ static bool tw_signbit(float x) { return copysignf(1.0f, x) < 0; }
__device__ static bool tw_signbit(double x) { return copysign(1.0, x) < 0; }
template <typename T> __device__ static bool tw_signbit(T x) { return x < 0; }
template <typename T> __device__ static T tw_truncdiv(T a, T b) { return a / b; }
template <typename T> __device__ static T tw_mod(T a, T b) { return a % b; }
template <typename T> __device__ static T tw_floordiv(T a, T b) { return a / b - ((a % b != 0) && ((a < 0) != (b < 0))); }
__device__ static int tw_remainder(int a, int b) { const int r = a % b; return r != 0 && ((r < 0) != (b < 0)) ? r + b : r; }
__device__ static long long tw_remainder(long long a, long long b) {
  const long long r = a % b;
  return r != 0 && ((r < 0) != (b < 0)) ? r + b : r;
}
__device__ static float tw_remainder(float a, float b) { const float r = fmodf(a, b); return r != 0 && ((r < 0) != (b < 0)) ? r + b : r; }
__device__ static double tw_remainder(double a, double b) { const double r = fmod(a, b); return r != 0 && ((r < 0) != (b < 0)) ? r + b : r; }
