// Kernels of whole loops on the host: every GPU thread is a thread of its own that runs until it waits for others. Which one runs
// next is chosen by a seed, so that a barrier that is missing shows in some order.
#pragma once
#include <ucontext.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#define TW_EMULATED
#define __global__
#define __device__
#define __restrict__
#define __launch_bounds__(...)

struct Index { int x; };
struct Barrier { int waiting = 0, generation = 0; };
struct Fiber {
  ucontext_t context;
  std::vector<char> stack;
  Index thread, block;
  bool over = false;
  double swapped = 0;
};
static std::vector<Fiber> fibers;
static std::vector<Barrier> of_block, of_warp;
static std::vector<std::vector<unsigned char>> memory_of_block;
static Barrier of_grid;
static ucontext_t scheduler;
static int current, num_blocks, num_threads;
static long quiet;  // turns in which nothing happened

#define threadIdx (fibers[current].thread)
#define blockIdx (fibers[current].block)
#define TW_SHARED unsigned char* shared = memory_of_block[blockIdx.x].data();

static void wait(Barrier& b, int count) {
  const int generation = b.generation;
  if (++b.waiting == count) {
    b.waiting = 0;
    b.generation += 1;
    quiet = 0;
    return;
  }
  while (b.generation == generation) {
    quiet += 1;
    swapcontext(&fibers[current].context, &scheduler);
  }
}
static void __syncthreads() { wait(of_block[blockIdx.x], num_threads); }
#define tw_grid_barrier(scratch, epoch) ((void)(epoch), wait(of_grid, num_blocks * num_threads))
static void tw_fetch(unsigned char* to, const unsigned char* from, int bytes, int thread, int threads) {
  for (int i = thread * 4; i < bytes; i += threads * 4) memcpy(to + i, from + i, 4);
}
static void tw_fetch_sent() {}
static void tw_fetched() {}
template <typename T> static T tw_far(const T* p) { return *p; }
template <typename T> static T tw_swap(T x, int other) {
  const int warp = (blockIdx.x * num_threads + threadIdx.x) / 32, lanes = num_threads < 32 ? num_threads : 32;
  fibers[current].swapped = (double)x;
  wait(of_warp[warp], lanes);
  const T found = (T)fibers[current ^ other].swapped;
  wait(of_warp[warp], lanes);
  return found;
}
static float __int_as_float(int x) { float f; memcpy(&f, &x, 4); return f; }

typedef unsigned long long u64;
struct Arguments { const long long* places; unsigned char* scratch; unsigned int* wrong; long long steps; u64 base, counter; };
static Arguments arguments;
static void kernel(const Arguments&);
static void begin() {
  kernel(arguments);
  fibers[current].over = true;
  quiet = 0;
  swapcontext(&fibers[current].context, &scheduler);
}

extern "C" int emulate(const long long* places, unsigned char* scratch, unsigned int* wrong, long long steps, u64 base, u64 counter,
                       int blocks, int threads, int shared, int seed) {
  num_blocks = blocks, num_threads = threads;
  fibers = std::vector<Fiber>(blocks * threads);
  of_block = std::vector<Barrier>(blocks);
  of_warp = std::vector<Barrier>(blocks * threads / 32 + 1);
  of_grid = Barrier();
  memory_of_block.assign(blocks, std::vector<unsigned char>(shared + 16, 0xff));
  arguments = {places, scratch, wrong, steps, base, counter};
  std::mt19937 random(seed);
  std::vector<int> order(fibers.size());
  for (size_t i = 0; i < fibers.size(); ++i) {
    Fiber& f = fibers[i];
    order[i] = (int)i;
    f.stack.resize(24 << 10);
    f.thread.x = (int)i % threads, f.block.x = (int)i / threads;
    getcontext(&f.context);
    f.context.uc_stack.ss_sp = f.stack.data();
    f.context.uc_stack.ss_size = f.stack.size();
    f.context.uc_link = nullptr;
    makecontext(&f.context, begin, 0);
  }
  for (quiet = 0;;) {
    if (seed == 1) for (size_t i = 0; i < order.size(); ++i) order[i] = (int)(order.size() - 1 - i);
    if (seed > 1) for (size_t i = order.size() - 1; i > 0; --i) std::swap(order[i], order[random() % (i + 1)]);
    bool over = true;
    for (int i : order) {
      if (fibers[i].over) continue;
      over = false;
      current = i;
      swapcontext(&scheduler, &fibers[i].context);
    }
    if (over) return 0;
    if (quiet > (long)fibers.size() * 8) return 1;  // all wait for each other
  }
}
