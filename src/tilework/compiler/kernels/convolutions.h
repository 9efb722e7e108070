// Convolutions that are too small for a library call to pay.
//
// Stride 1: an image is copied once into "wide" planes, with its zero border, [c][height][width]. Each tap of the kernel then
// is a shift: output[y * width + x] += weight * plane[y * width + x + shift], over the whole plane at once, in long vectors
// without tests. The columns beyond the output's own width are rubbish; they are dropped at the end (or zeroed before, in
// gradients). Other strides: the image is unfolded into columns, and the rest is one matrix product.
#pragma once
#include "products.h"

namespace tilework {

struct Conv {
  int64_t n, c, h, w, o, kh, kw, oh, ow, groups, sh, sw, ph, pw, dh, dw;
  constexpr int64_t channels() const { return c / groups; }             // of one group
  constexpr int64_t outputs() const { return o / groups; }
  constexpr int64_t depth() const { return channels() * kh * kw; }      // rows of the unfolded image, for one group
  constexpr int64_t places() const { return oh * ow; }                  // its columns
  constexpr int64_t width() const { return w + 2 * pw; }                // of a wide plane
  constexpr int64_t used() const { return (oh - 1) * width() + ow; }    // the part of it where outputs lie
  constexpr int64_t shift(int64_t i, int64_t j) const { return i * dh * width() + j * dw; }
  constexpr int64_t vectors() const { return (used() + kLanes - 1) / kLanes; }
  // Floats of a plane, with room for the last block of vectors to reach beyond it.
  constexpr int64_t plane() const { return (std::max((h + 2 * ph) * width(), used()) + shift(kh - 1, kw - 1) + 9 * kLanes) / kLanes * kLanes; }
  constexpr int64_t work() const { return n * o * places() * depth(); }
};

// Below this many multiplications a convolution stays on the calling thread.
constexpr int64_t kSerialConv = 1 << 21;

// h x w values into the middle of a wide plane; everything else becomes zero.
template <Conv v>
static inline void widen(const float* from, int64_t rows, int64_t columns, int64_t top, int64_t left, float* plane) {
  memset(plane, 0, v.plane() * sizeof(float));
  for (int64_t y = 0; y < rows; ++y) memcpy(plane + (y + top) * v.width() + left, from + y * columns, columns * sizeof(float));
}

// The same the other way round.
template <Conv v>
static inline void narrow(const float* plane, int64_t rows, int64_t columns, int64_t top, int64_t left, float* to) {
  for (int64_t y = 0; y < rows; ++y) memcpy(to + y * columns, plane + (y + top) * v.width() + left, columns * sizeof(float));
}

// OB outputs x XB vectors of the wide result, all taps
template <Conv v, int OB, int XB>
static inline void forward_block(const float* planes, const float* weight, float* wide) {
  constexpr int64_t plane = v.plane(), depth = v.depth();
  Vec total[OB][XB] = {};
  for (int64_t c = 0; c < v.channels(); ++c)
    for (int64_t i = 0; i < v.kh; ++i)
      for (int64_t j = 0; j < v.kw; ++j) {
        const float* x = planes + c * plane + v.shift(i, j);
        const float* tap = weight + (c * v.kh + i) * v.kw + j;
        Vec image[XB];
#pragma GCC unroll 8
        for (int b = 0; b < XB; ++b) image[b] = load(x + b * kLanes), hold(image[b]);
#pragma GCC unroll 8
        for (int o = 0; o < OB; ++o) {
          const Vec factor = all(tap[o * depth]);
#pragma GCC unroll 8
          for (int b = 0; b < XB; ++b) total[o][b] = fma(factor, image[b], total[o][b]);
        }
      }
  for (int o = 0; o < OB; ++o)
    for (int b = 0; b < XB; ++b) store(wide + o * plane + b * kLanes, total[o][b]);
}

template <Conv v, int OB>
static inline void forward_rows(const float* planes, const float* weight, float* wide, float* out) {
  pieces<kManyRegisters ? 5 : 2, v.vectors()>([&]<int XB>(int64_t b) {
    forward_block<v, OB, XB>(planes + b * kLanes, weight, wide + b * kLanes);
  });
  for (int o = 0; o < OB; ++o) narrow<v>(wide + o * v.plane(), v.oh, v.ow, 0, 0, out + o * v.places());
}

constexpr int kBlock = 4;  // outputs at a time

// Blocks [from, to) of one image's outputs; blocks do not cross groups
template <Conv v>
static inline void forward_image(const float* x, const float* weight, float* out, int64_t from, int64_t to) {
  constexpr int64_t each = (v.outputs() + kBlock - 1) / kBlock, rest = v.outputs() % kBlock;
  static thread_local Scratch room;
  float* planes = room.take((v.channels() + kBlock) * v.plane());
  float* wide = planes + v.channels() * v.plane();
  for (int64_t at = from; at < to; ++at) {
    const int64_t g = at / each, o = g * v.outputs() + at % each * kBlock;
    if (at == from || at % each == 0)
      for (int64_t c = 0; c < v.channels(); ++c)
        widen<v>(x + (g * v.channels() + c) * v.h * v.w, v.h, v.w, v.ph, v.pw, planes + c * v.plane());
    const float* w = weight + o * v.depth();
    if (rest != 0 && at % each == each - 1)
      forward_rows<v, rest == 0 ? 1 : rest>(planes, w, wide, out + o * v.places());
    else if constexpr (v.outputs() >= kBlock)
      forward_rows<v, kBlock>(planes, w, wide, out + o * v.places());
  }
}

// All images. Threads share out the images, and where there are too few of them, the outputs of each
template <Conv v>
static inline void forward_images(const float* x, const float* weight, float* out) {
  constexpr int64_t blocks = v.groups * ((v.outputs() + kBlock - 1) / kBlock);
  const int64_t threads = v.work() >= kSerialConv && !omp_in_parallel() ? omp_get_max_threads() : 1;
  const int64_t shares = std::min<int64_t>((threads + v.n - 1) / v.n, blocks);
#pragma omp parallel for if (threads > 1) schedule(static)
  for (int64_t i = 0; i < v.n * shares; ++i) {
    const int64_t n = i / shares, k = i % shares;
    forward_image<v>(x + n * v.c * v.h * v.w, weight, out + n * v.o * v.places(), blocks * k / shares, blocks * (k + 1) / shares);
  }
}

// The gradient of the images is a convolution too: of the gradients, with the weights turned round and its border at the other side
constexpr Conv turned_round(Conv v) {
  return {v.n, v.o, v.oh, v.ow, v.c, v.kh, v.kw, v.h, v.w, v.groups, 1, 1, v.dh * (v.kh - 1) - v.ph, v.dw * (v.kw - 1) - v.pw, v.dh, v.dw};
}

template <Conv v>
static inline void input_images(const float* grad, const float* weight, float* out) {
  constexpr int64_t taps = v.kh * v.kw;
  static thread_local Scratch room;
  float* turned = room.take(v.o * v.depth());  // [channel][output of its group][tap]
  for (int64_t g = 0; g < v.groups; ++g)
    for (int64_t c = 0; c < v.channels(); ++c)
      for (int64_t o = 0; o < v.outputs(); ++o) {
        const float* from = weight + (g * v.outputs() + o) * v.depth() + c * taps;
        float* to = turned + ((g * v.channels() + c) * v.outputs() + o) * taps;
        for (int64_t t = 0; t < taps; ++t) to[t] = from[taps - 1 - t];
      }
  forward_images<turned_round(v)>(grad, turned, out);
}

// ---- gradient of the weights, in one of two ways ----
// By dots: vectors run along the image, one sum for each output and tap. By outputs: vectors run along the outputs, whose
// gradients are turned round for it; no lanes have to be added up, but it pays only where outputs fill a vector.

// OB outputs x JB neighbouring taps, summed over all images; `step` floats from one output's gradients to the next
template <Conv v, int OB, int JB>
static inline void weight_dots(const float* planes, const float* grads, int64_t step, float* out) {
  Vec total[(OB * JB + kLanes - 1) / kLanes * kLanes] = {};
  for (int64_t n = 0; n < v.n; ++n) {
    const float *x = planes + n * v.plane(), *g = grads + n * v.plane();
    for (int64_t b = 0; b < v.vectors(); ++b, x += kLanes, g += kLanes) {
      Vec given[OB];
#pragma GCC unroll 8
      for (int o = 0; o < OB; ++o) given[o] = load(g + o * step), hold(given[o]);
#pragma GCC unroll 8
      for (int j = 0; j < JB; ++j) {
        Vec image = load(x + j * v.dw);
        hold(image);
#pragma GCC unroll 8
        for (int o = 0; o < OB; ++o) total[o * JB + j] = fma(given[o], image, total[o * JB + j]);
      }
    }
  }
  float found[sizeof(total) / sizeof(Vec)];
  for (int64_t k = 0; k < OB * JB; k += kLanes) store(found + k, sums(total + k));
  for (int o = 0; o < OB; ++o)
    for (int j = 0; j < JB; ++j) out[o * v.depth() + j] = found[o * JB + j];
}

template <Conv v, int OB>
static inline void weight_rows(const float* planes, const float* grads, int64_t step, float* out) {
  for (int64_t i = 0; i < v.kh; ++i)
    pieces<kManyRegisters ? 5 : 2, v.kw>([&]<int JB>(int64_t j) {
      weight_dots<v, OB, JB>(planes + v.shift(i, j), grads, step, out + i * v.kw + j);
    });
}

// IB x JB taps of one channel x kLanes outputs, added up over `rows` rows of one image.
// turned: [places][lanes] gradients of these rows; found: [taps][lanes]
template <Conv v, int IB, int JB>
static inline void weight_outputs(const float* plane, const float* turned, int64_t rows, float* found) {
  Vec total[IB][JB];
  for (int i = 0; i < IB; ++i)
    for (int j = 0; j < JB; ++j) total[i][j] = load(found + (i * v.kw + j) * kLanes);
  for (int64_t y = 0; y < rows; ++y) {
    const float* x = plane + y * v.width();
    for (int64_t column = 0; column < v.ow; ++column, ++x, turned += kLanes) {
      Vec given = load(turned);
      hold(given);
#pragma GCC unroll 8
      for (int i = 0; i < IB; ++i)
#pragma GCC unroll 8
        for (int j = 0; j < JB; ++j) total[i][j] = fma(all(x[v.shift(i, j)]), given, total[i][j]);
    }
  }
  for (int i = 0; i < IB; ++i)
    for (int j = 0; j < JB; ++j) store(found + (i * v.kw + j) * kLanes, total[i][j]);
}

// Channels [from, to) by outputs: some rows of the gradients at a time, which stay in the cache for all of these channels
template <Conv v>
static inline void weight_channels(const float* planes, const float* grads, int64_t from, int64_t to, float* weights) {
  constexpr int kMost = kManyRegisters ? 5 : 3;
  constexpr int64_t blocks = (v.outputs() + kLanes - 1) / kLanes, taps = v.kh * v.kw, some = std::max<int64_t>(1, 256 / v.ow);
  static thread_local Scratch room;
  float* found = room.take((to - from) * blocks * taps * kLanes);
  memset(found, 0, (to - from) * blocks * taps * kLanes * sizeof(float));
  for (int64_t n = 0; n < v.n; ++n)
    for (int64_t y = 0; y < v.oh; y += some)
      for (int64_t b = 0; b < blocks; ++b)
        for (int64_t c = from; c < to; ++c)
          pieces<kMost, v.kh>([&]<int IB>(int64_t i) {
            pieces<kMost, v.kw>([&]<int JB>(int64_t j) {
              weight_outputs<v, IB, JB>(planes + (c * v.n + n) * v.plane() + y * v.width() + v.shift(i, j),
                                        grads + ((b * v.n + n) * v.places() + y * v.ow) * kLanes, std::min(some, v.oh - y),
                                        found + (((c - from) * blocks + b) * taps + i * v.kw + j) * kLanes);
            });
          });
  for (int64_t c = from; c < to; ++c)
    for (int64_t o = 0; o < v.outputs(); ++o)
      for (int64_t t = 0; t < taps; ++t)
        weights[o * v.depth() + c * taps + t] = found[(((c - from) * blocks + o / kLanes) * taps + t) * kLanes + o % kLanes];
}

template <Conv v>
static inline void weight_wide(const float* grad, const float* x, float* out) {
  static thread_local Scratch room;
  // [group's channels][n][plane], then [group's outputs][n][plane]: the images of one channel lie in a row
  constexpr int64_t step = v.n * v.plane(), blocks = (v.outputs() + kLanes - 1) / kLanes;
  constexpr bool by_outputs = blocks * v.n * v.places() < v.outputs() * (v.n * v.vectors() + 5);
  constexpr int64_t turned_size = blocks * v.n * v.places() * kLanes;
  float* planes = room.take(v.channels() * step + (by_outputs ? turned_size : v.outputs() * step));
  float* grads = planes + v.channels() * step;
  for (int64_t g = 0; g < v.groups; ++g) {
    const float* given = grad + g * v.outputs() * v.places();
    float* weights = out + g * v.outputs() * v.depth();
#pragma omp parallel for if (v.work() >= kSerialConv && !omp_in_parallel()) schedule(static)
    for (int64_t i = 0; i < v.n * (v.channels() + blocks); ++i) {
      const int64_t n = i / (v.channels() + blocks), k = i % (v.channels() + blocks) - blocks;
      if (k >= 0) {
        widen<v>(x + (n * v.c + g * v.channels() + k) * v.h * v.w, v.h, v.w, v.ph, v.pw, planes + k * step + n * v.plane());
        continue;
      }
      for (int64_t o = (k + blocks) * kLanes; o < (k + blocks + 1) * kLanes; ++o) {
        const float* from = given + (n * v.o + o) * v.places();
        if constexpr (by_outputs) {
          float* to = grads + ((k + blocks) * v.n + n) * v.places() * kLanes + o % kLanes;
          for (int64_t p = 0; p < v.places(); ++p) to[p * kLanes] = o < v.outputs() ? from[p] : 0.0f;
        } else if (o < v.outputs()) {
          widen<v>(from, v.oh, v.ow, 0, 0, grads + o * step + n * v.plane());
        }
      }
    }
    constexpr int64_t each = by_outputs ? std::clamp<int64_t>(v.channels() / 8, 1, 8) : 1, parts = (v.channels() + each - 1) / each;
#pragma omp parallel for if (v.work() >= kSerialConv && !omp_in_parallel()) schedule(static)
    for (int64_t part = 0; part < parts; ++part) {
      const int64_t c = part * each;
      if constexpr (by_outputs)
        weight_channels<v>(planes, grads, c, std::min(c + each, v.channels()), weights);
      else
        for (int64_t o = 0; o < v.outputs();) {
          float* to = weights + o * v.depth() + c * v.kh * v.kw;
          if (o + 3 <= v.outputs()) weight_rows<v, 3>(planes + c * step, grads + o * step, step, to), o += 3;
          else weight_rows<v, 1>(planes + c * step, grads + o * step, step, to), o += 1;
        }
    }
  }
}

// ---- other strides: columns[depth][places] of one group of one image ----

template <Conv v>
static inline void unfold(const float* image, float* columns) {
  for (int64_t c = 0; c < v.channels(); ++c)
    for (int64_t i = 0; i < v.kh; ++i)
      for (int64_t j = 0; j < v.kw; ++j)
        for (int64_t y = 0; y < v.oh; ++y, columns += v.ow) {
          const int64_t row = y * v.sh - v.ph + i * v.dh;
          const float* line = image + (c * v.h + row) * v.w;
          for (int64_t x = 0; x < v.ow; ++x) {
            const int64_t column = x * v.sw + j * v.dw - v.pw;
            columns[x] = row >= 0 && row < v.h && column >= 0 && column < v.w ? line[column] : 0.0f;
          }
        }
}

// adds columns back to where unfold took them from
template <Conv v>
static inline void fold(const float* columns, float* image) {
  for (int64_t c = 0; c < v.channels(); ++c)
    for (int64_t i = 0; i < v.kh; ++i)
      for (int64_t j = 0; j < v.kw; ++j)
        for (int64_t y = 0; y < v.oh; ++y, columns += v.ow) {
          const int64_t row = y * v.sh - v.ph + i * v.dh;
          if (row < 0 || row >= v.h) continue;
          float* line = image + (c * v.h + row) * v.w;
          for (int64_t x = 0; x < v.ow; ++x) {
            const int64_t column = x * v.sw + j * v.dw - v.pw;
            if (column >= 0 && column < v.w) line[column] += columns[x];
          }
        }
}

// ---- what the generated code calls; out, x, weight and grad are dense. Each shape gets code of its own ----

template <Conv v>
static inline void small_conv(float* out, const float* x, const float* weight) {
  if constexpr (v.sh == 1 && v.sw == 1) return forward_images<v>(x, weight, out);
#pragma omp parallel for if (v.n > 1 && v.work() >= kSerialConv) schedule(static)
  for (int64_t n = 0; n < v.n; ++n) {
    static thread_local Scratch room;
    float* columns = room.take(v.depth() * v.places());
    for (int64_t g = 0; g < v.groups; ++g) {
      unfold<v>(x + (n * v.c + g * v.channels()) * v.h * v.w, columns);
      gemm({weight + g * v.outputs() * v.depth(), v.outputs(), v.depth(), v.depth(), false},
           {columns, v.depth(), v.places(), v.places(), false}, out + (n * v.o + g * v.outputs()) * v.places(), v.places(), 1.0f, 0.0f);
    }
  }
}

template <Conv v>
static inline void small_conv_input_grad(float* out, const float* grad, const float* weight) {
  if constexpr (v.sh == 1 && v.sw == 1 && turned_round(v).ph >= 0 && turned_round(v).pw >= 0) return input_images<v>(grad, weight, out);
#pragma omp parallel for if (v.n > 1 && v.work() >= kSerialConv) schedule(static)
  for (int64_t n = 0; n < v.n; ++n) {
    static thread_local Scratch room;
    float* columns = room.take(v.depth() * v.places());
    for (int64_t g = 0; g < v.groups; ++g) {
      float* image = out + (n * v.c + g * v.channels()) * v.h * v.w;
      memset(image, 0, v.channels() * v.h * v.w * sizeof(float));
      gemm({weight + g * v.outputs() * v.depth(), v.depth(), v.outputs(), v.depth(), true},
           {grad + (n * v.o + g * v.outputs()) * v.places(), v.outputs(), v.places(), v.places(), false}, columns, v.places(), 1.0f,
           0.0f);
      fold<v>(columns, image);
    }
  }
}

constexpr Conv with_images(Conv v, int64_t n) {
  v.n = n;
  return v;
}

// Many images: groups of a few, which stay in the cache, each with a sum of its own; then these are added up. The groups do
// not depend on the number of threads, so the result does not either.
template <Conv v>
static inline void weight_groups(const float* grad, const float* x, float* out) {
  constexpr int64_t each = 8, groups = (v.n + each - 1) / each, size = v.o * v.depth();
  static thread_local Scratch room;
  float* parts = room.take(groups * size);
#pragma omp parallel for if (v.work() >= kSerialConv) schedule(static)
  for (int64_t i = 0; i < groups; ++i) {
    const float *g = grad + i * each * v.o * v.places(), *images = x + i * each * v.c * v.h * v.w;
    if (i + 1 < groups || v.n % each == 0)
      weight_wide<with_images(v, each)>(g, images, parts + i * size);
    else
      weight_wide<with_images(v, v.n % each == 0 ? each : v.n % each)>(g, images, parts + i * size);
  }
  for (int64_t k = 0; k < size; ++k) {
    float total = parts[k];
    for (int64_t i = 1; i < groups; ++i) total += parts[i * size + k];
    out[k] = total;
  }
}

template <Conv v>
static inline void small_conv_weight_grad(float* out, const float* grad, const float* x) {
  if constexpr (v.sh == 1 && v.sw == 1) {
    if constexpr (v.n > 8)
      return weight_groups<v>(grad, x, out);
    else
      return weight_wide<v>(grad, x, out);
  }
  static thread_local Scratch room;
  float* columns = room.take(v.depth() * v.places());
  for (int64_t n = 0; n < v.n; ++n)  // one image after the other: the sum has one order, whatever the number of threads
    for (int64_t g = 0; g < v.groups; ++g) {
      unfold<v>(x + (n * v.c + g * v.channels()) * v.h * v.w, columns);
      gemm({grad + (n * v.o + g * v.outputs()) * v.places(), v.outputs(), v.places(), v.places(), false},
           {columns, v.places(), v.depth(), v.places(), true}, out + g * v.outputs() * v.depth(), v.depth(), 1.0f, n == 0 ? 0.0f : 1.0f);
    }
}

}  // namespace tilework
