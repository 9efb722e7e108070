// Native code that programs share: matrix products straight to BLAS, and convolutions that are too small for a library.
//
// torch's own entry points for matrix products go through its operator dispatcher several times a call (to expand a bias,
// to resolve conjugation); these do not. Anything they cannot do (other dtypes, odd strides) they hand back to torch.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstring>
#include <stdexcept>
#include <vector>

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>

extern "C" void sgemm_(const char*, const char*, const int*, const int*, const int*, const float*, const float*, const int*,
                       const float*, const int*, const float*, float*, const int*);

// MKL's own setting of threads for the calling thread; null where BLAS is another library.
extern "C" __attribute__((weak)) int MKL_Set_Num_Threads_Local(int);

namespace tilework {

// What went wrong inside a parallel loop, which must not throw. Programs ask after each kernel that can fail.
static std::atomic<const char*> failure{nullptr};

static inline void check() {
  if (const char* what = failure.exchange(nullptr)) throw std::runtime_error(what);
}

// Below this many multiplications a product runs on the calling thread alone: waking others costs more than it brings, and
// very much more where they have to wait for a core.
constexpr int64_t kSerialProduct = 1 << 20;

struct View {  // of a tensor that somebody else owns
  float* data;
  int64_t dims;
  const int64_t* shape;
  const int64_t* stride;
  bool is_float;
};

static inline View view(AtenTensorHandle handle) {
  View v{};
  int32_t dtype;
  void* data;
  int64_t *shape, *stride;
  aoti_torch_get_dtype(handle, &dtype);
  aoti_torch_get_data_ptr(handle, &data);
  aoti_torch_get_dim(handle, &v.dims);
  aoti_torch_get_sizes(handle, &shape);
  aoti_torch_get_strides(handle, &stride);
  v.data = static_cast<float*>(data);
  v.shape = shape;
  v.stride = stride;
  v.is_float = dtype == aoti_torch_dtype_float32();
  return v;
}

struct Matrix {  // rows x columns; `transposed`: columns lie one after the other in memory
  const float* data;
  int64_t rows, columns, leading;
  bool transposed;
};

// Describes a 2-D view for BLAS; false where its strides do not allow that.
static inline bool matrix(const float* data, int64_t rows, int64_t columns, int64_t row_stride, int64_t column_stride, Matrix* m) {
  *m = {data, rows, columns, 0, false};
  if (column_stride == 1 || columns == 1) {
    m->leading = rows == 1 ? std::max<int64_t>(columns, 1) : row_stride;
    if (m->leading >= columns && (columns > 1 || row_stride >= 1)) return true;
  }
  if (row_stride == 1 || rows == 1) {
    m->transposed = true;
    m->leading = columns == 1 ? std::max<int64_t>(rows, 1) : column_stride;
    return m->leading >= rows;
  }
  return false;
}

// out = alpha a b + beta out, `out` row by row. BLAS counts by columns, so this is out^T = b^T a^T.
static inline void gemm(const Matrix& a, const Matrix& b, float* out, int64_t out_leading, float alpha, float beta) {
  int m = b.columns, n = a.rows, k = a.columns;
  int lda = a.leading, ldb = b.leading, ldc = out_leading;
  const bool alone = MKL_Set_Num_Threads_Local && (int64_t)m * n * k < kSerialProduct;
  const int before = alone ? MKL_Set_Num_Threads_Local(1) : 0;
  sgemm_(b.transposed ? "T" : "N", a.transposed ? "T" : "N", &m, &n, &k, &alpha, b.data, &ldb, a.data, &lda, &beta, out, &ldc);
  if (alone) MKL_Set_Num_Threads_Local(before);
}

static inline bool product(const View& a, const View& b, const View& out, float alpha, float beta, int64_t batch_index, bool batched) {
  int64_t o = batched ? 1 : 0;
  if (out.stride[o + 1] != 1 && out.shape[o + 1] != 1) return false;
  int64_t leading = out.shape[o] == 1 ? std::max<int64_t>(out.shape[o + 1], 1) : out.stride[o];
  if (leading < out.shape[o + 1]) return false;
  Matrix ma, mb;
  const float* da = a.data + (batched ? batch_index * a.stride[0] : 0);
  const float* db = b.data + (batched ? batch_index * b.stride[0] : 0);
  if (!matrix(da, a.shape[o], a.shape[o + 1], a.stride[o], a.stride[o + 1], &ma)) return false;
  if (!matrix(db, b.shape[o], b.shape[o + 1], b.stride[o], b.stride[o + 1], &mb)) return false;
  gemm(ma, mb, out.data + (batched ? batch_index * out.stride[0] : 0), leading, alpha, beta);
  return true;
}

static inline bool plain(const View& a, const View& b, const View& out) {
  if (!(a.is_float && b.is_float && out.is_float)) return false;
  for (const View* v : {&a, &b, &out})
    for (int64_t i = 0; i < v->dims; ++i)
      if (v->shape[i] <= 0 || v->shape[i] > 2000000000) return false;
  return true;
}

static inline AOTITorchError mm_out(AtenTensorHandle out, AtenTensorHandle a, AtenTensorHandle b) {
  View vo = view(out), va = view(a), vb = view(b);
  if (plain(va, vb, vo) && product(va, vb, vo, 1.0f, 0.0f, 0, false)) return 0;
  return aoti_torch_cpu_mm_out(out, a, b);
}

static inline AOTITorchError bmm_out(AtenTensorHandle out, AtenTensorHandle a, AtenTensorHandle b) {
  View vo = view(out), va = view(a), vb = view(b);
  if (!plain(va, vb, vo)) return aoti_torch_cpu_bmm_out(out, a, b);
  if (!product(va, vb, vo, 1.0f, 0.0f, 0, true)) return aoti_torch_cpu_bmm_out(out, a, b);
  const int64_t work = vo.shape[0] * vo.shape[1] * vo.shape[2] * va.shape[2];
#pragma omp parallel for if (work > 200000)
  for (int64_t i = 1; i < vo.shape[0]; ++i) product(va, vb, vo, 1.0f, 0.0f, i, true);
  return 0;
}

static inline AOTITorchError addmm_out(AtenTensorHandle out, AtenTensorHandle bias, AtenTensorHandle a, AtenTensorHandle b, double beta,
                                       double alpha) {
  View vo = view(out), va = view(a), vb = view(b), vi = view(bias);
  const bool simple = plain(va, vb, vo) && vi.is_float && vi.dims <= 2 && vo.dims == 2 && vo.stride[1] == 1;
  if (!simple || vo.data == vi.data) return aoti_torch_cpu_addmm_out(out, bias, a, b, beta, alpha);
  const int64_t rows = vo.shape[0], columns = vo.shape[1];
  const int64_t column_size = vi.dims ? vi.shape[vi.dims - 1] : 1, row_size = vi.dims == 2 ? vi.shape[0] : 1;
  const int64_t column_stride = column_size == 1 ? 0 : vi.stride[vi.dims - 1];
  const int64_t row_stride = row_size == 1 ? 0 : vi.stride[0];
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = 0; j < columns; ++j) vo.data[i * vo.stride[0] + j] = vi.data[i * row_stride + j * column_stride];
  if (product(va, vb, vo, (float)alpha, (float)beta, 0, false)) return 0;
  return aoti_torch_cpu_addmm_out(out, bias, a, b, beta, alpha);
}

// ---- small convolutions: unfold one image into columns, multiply, fold back ----

struct Conv {
  int64_t n, c, h, w, o, kh, kw, oh, ow, groups, sh, sw, ph, pw, dh, dw;
  int64_t depth() const { return c / groups * kh * kw; }  // rows of the unfolded image, for one group
  int64_t places() const { return oh * ow; }              // its columns
};

static inline Conv conv(const int64_t* x, const int64_t* weight, const int64_t* out, const int64_t* stride, const int64_t* padding,
                        const int64_t* dilation, int64_t groups) {
  return {x[0], x[1], x[2], x[3], weight[0], weight[2], weight[3], out[2], out[3], groups,
          stride[0], stride[1], padding[0], padding[1], dilation[0], dilation[1]};
}

// columns[depth][places] of channels [first, first + c / groups) of one image
static inline void unfold(const Conv& v, const float* image, float* columns) {
  for (int64_t c = 0; c < v.c / v.groups; ++c)
    for (int64_t i = 0; i < v.kh; ++i)
      for (int64_t j = 0; j < v.kw; ++j)
        for (int64_t y = 0; y < v.oh; ++y, columns += v.ow) {
          const int64_t row = y * v.sh - v.ph + i * v.dh;
          if (row < 0 || row >= v.h) {
            memset(columns, 0, v.ow * sizeof(float));
            continue;
          }
          const float* line = image + (c * v.h + row) * v.w;
          const int64_t shift = j * v.dw - v.pw;
          if (v.sw == 1) {
            const int64_t from = std::min(std::max<int64_t>(0, -shift), v.ow);
            const int64_t to = std::max(from, std::min(v.ow, v.w - shift));
            memset(columns, 0, from * sizeof(float));
            memcpy(columns + from, line + from + shift, (to - from) * sizeof(float));
            memset(columns + to, 0, (v.ow - to) * sizeof(float));
          } else {
            for (int64_t x = 0; x < v.ow; ++x) {
              const int64_t column = x * v.sw + shift;
              columns[x] = column >= 0 && column < v.w ? line[column] : 0.0f;
            }
          }
        }
}

// adds columns back to where unfold took them from
static inline void fold(const Conv& v, const float* columns, float* image) {
  for (int64_t c = 0; c < v.c / v.groups; ++c)
    for (int64_t i = 0; i < v.kh; ++i)
      for (int64_t j = 0; j < v.kw; ++j)
        for (int64_t y = 0; y < v.oh; ++y, columns += v.ow) {
          const int64_t row = y * v.sh - v.ph + i * v.dh;
          if (row < 0 || row >= v.h) continue;
          float* line = image + (c * v.h + row) * v.w;
          const int64_t shift = j * v.dw - v.pw;
          const int64_t from = v.sw == 1 ? std::min(std::max<int64_t>(0, -shift), v.ow) : 0;
          const int64_t to = v.sw == 1 ? std::max(from, std::min(v.ow, v.w - shift)) : v.ow;
          for (int64_t x = from; x < to; ++x) {
            const int64_t column = x * v.sw + shift;
            if (v.sw == 1 || (column >= 0 && column < v.w)) line[column] += columns[x];
          }
        }
}

static inline float* scratch(int64_t floats) {
  static thread_local std::vector<float> room;
  if ((int64_t)room.size() < floats) room.resize(floats);
  return room.data();
}

// The values of a 4-D tensor, dense: where they lie, or copied to `room` if the tensor has another layout (channels last, say).
static inline const float* dense(const View& v, std::vector<float>& room) {
  const int64_t *n = v.shape, *s = v.stride;
  int64_t step = 1;
  bool plain = true;
  for (int64_t i = 3; i >= 0; --i) {
    plain = plain && (n[i] == 1 || s[i] == step);
    step *= n[i];
  }
  if (plain) return v.data;
  room.resize(step);
  float* to = room.data();
  for (int64_t a = 0; a < n[0]; ++a)
    for (int64_t b = 0; b < n[1]; ++b)
      for (int64_t c = 0; c < n[2]; ++c)
        for (int64_t d = 0; d < n[3]; ++d) *to++ = v.data[a * s[0] + b * s[1] + c * s[2] + d * s[3]];
  return room.data();
}

static inline AtenTensorHandle empty4(const int64_t* shape) {
  const int64_t stride[4] = {shape[1] * shape[2] * shape[3], shape[2] * shape[3], shape[3], 1};
  AtenTensorHandle handle;
  aoti_torch_empty_strided(4, shape, stride, aoti_torch_dtype_float32(), aoti_torch_device_type_cpu(), 0, &handle);
  return handle;
}

}  // namespace tilework

// The names that Inductor's generated code calls for tilework::small_conv and its gradients.

extern "C" inline AOTITorchError aoti_torch_cpu_small_conv(AtenTensorHandle x, AtenTensorHandle weight, const int64_t* stride, int64_t,
                                                           const int64_t* padding, int64_t, const int64_t* dilation, int64_t,
                                                           int64_t groups, AtenTensorHandle* ret) {
  using namespace tilework;
  View vx = view(x), vw = view(weight);
  static thread_local std::vector<float> room_x, room_w;
  const float *px = dense(vx, room_x), *pw = dense(vw, room_w);
  int64_t shape[4] = {vx.shape[0], vw.shape[0],
                      (vx.shape[2] + 2 * padding[0] - dilation[0] * (vw.shape[2] - 1) - 1) / stride[0] + 1,
                      (vx.shape[3] + 2 * padding[1] - dilation[1] * (vw.shape[3] - 1) - 1) / stride[1] + 1};
  *ret = empty4(shape);
  float* out = view(*ret).data;
  const Conv v = conv(vx.shape, vw.shape, shape, stride, padding, dilation, groups);
  const int64_t depth = v.depth(), places = v.places(), each = v.o / groups;
#pragma omp parallel for if (v.n > 1)
  for (int64_t n = 0; n < v.n; ++n) {
    float* columns = scratch(depth * places);
    for (int64_t g = 0; g < groups; ++g) {
      unfold(v, px + (n * v.c + g * (v.c / groups)) * v.h * v.w, columns);
      gemm({pw + g * each * depth, each, depth, depth, false}, {columns, depth, places, places, false},
           out + (n * v.o + g * each) * places, places, 1.0f, 0.0f);
    }
  }
  return 0;
}

extern "C" inline AOTITorchError aoti_torch_cpu_small_conv_input_grad(AtenTensorHandle grad, AtenTensorHandle weight,
                                                                      const int64_t* input_shape, int64_t, const int64_t* stride, int64_t,
                                                                      const int64_t* padding, int64_t, const int64_t* dilation, int64_t,
                                                                      int64_t groups, AtenTensorHandle* ret) {
  using namespace tilework;
  View vg = view(grad), vw = view(weight);
  static thread_local std::vector<float> room_g, room_w;
  const float *pg = dense(vg, room_g), *pw = dense(vw, room_w);
  *ret = empty4(input_shape);
  float* out = view(*ret).data;
  const Conv v = conv(input_shape, vw.shape, vg.shape, stride, padding, dilation, groups);
  const int64_t depth = v.depth(), places = v.places(), each = v.o / groups, size = v.c / groups * v.h * v.w;
#pragma omp parallel for if (v.n > 1)
  for (int64_t n = 0; n < v.n; ++n) {
    float* columns = scratch(depth * places);
    for (int64_t g = 0; g < groups; ++g) {
      float* image = out + (n * groups + g) * size;
      memset(image, 0, size * sizeof(float));
      gemm({pw + g * each * depth, depth, each, depth, true}, {pg + (n * v.o + g * each) * places, each, places, places, false},
           columns, places, 1.0f, 0.0f);
      fold(v, columns, image);
    }
  }
  return 0;
}

extern "C" inline AOTITorchError aoti_torch_cpu_small_conv_weight_grad(AtenTensorHandle grad, AtenTensorHandle x,
                                                                       const int64_t* weight_shape, int64_t, const int64_t* stride, int64_t,
                                                                       const int64_t* padding, int64_t, const int64_t* dilation, int64_t,
                                                                       int64_t groups, AtenTensorHandle* ret) {
  using namespace tilework;
  View vg = view(grad), vx = view(x);
  static thread_local std::vector<float> room_g, room_x;
  const float *pg = dense(vg, room_g), *px = dense(vx, room_x);
  *ret = empty4(weight_shape);
  float* out = view(*ret).data;
  const Conv v = conv(vx.shape, weight_shape, vg.shape, stride, padding, dilation, groups);
  const int64_t depth = v.depth(), places = v.places(), each = v.o / groups;
  float* columns = scratch(depth * places);
  for (int64_t n = 0; n < v.n; ++n)  // one image after the other: the sum has one order, whatever the number of threads
    for (int64_t g = 0; g < groups; ++g) {
      unfold(v, px + (n * v.c + g * (v.c / groups)) * v.h * v.w, columns);
      gemm({pg + (n * v.o + g * each) * places, each, places, places, false}, {columns, places, depth, places, true},
           out + g * each * depth, depth, 1.0f, n == 0 ? 0.0f : 1.0f);
    }
  return 0;
}
