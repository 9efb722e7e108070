// What happens before and after a step's program: slices of the caller's memory come and go, hyperparameters get their values of this
// step, the seed is drawn. The table lies in the GPU's memory, so that one CUDA graph serves all steps and all addresses.
// runtime/cuda/loop.py has the same layout.

typedef unsigned long long u64;
typedef long long i64;

enum How { kEvery = 0, kOnce = 1, kAgain = 2, kLast = 3, kSum = 4, kStep = 5, kZero = 6 };
enum Type { kFloat32 = 0, kFloat64 = 1, kInt64 = 2, kBFloat16 = 3, kFloat16 = 4, kOther = 5 };

struct Copy {
  u64 buffer, memory;  // addresses: the session's buffer, the caller's slices
  i64 bytes;           // of one slice
  int how, type;
};

struct Table {
  u64 base, counter;  // of the random numbers
  u64 seed;           // address; 0: nothing is drawn
  i64 at, count;      // the micro-batch in the call, and how many there are
  i64 micro;          // micro-batches in a step
  int num_before, num_after;
  int ticket, keep;   // keep: the seed stays
  Copy copies[1];
};

__device__ static u64 next_seed(u64 base, u64 counter) {
  u64 z = base + (counter + 1) * 0x9E3779B97F4A7C15ull;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return (z ^ (z >> 31)) & 0x7FFFFFFFFFFFFFFFull;
}

__device__ static void move(char* to, const char* from, i64 bytes) {
  const i64 first = blockIdx.x * (i64)blockDim.x + threadIdx.x, all = gridDim.x * (i64)blockDim.x;
  if ((((u64)to | (u64)from | (u64)bytes) & 15) == 0) {
    for (i64 i = first; i < bytes / 16; i += all) ((int4*)to)[i] = ((const int4*)from)[i];
  } else if ((((u64)to | (u64)from | (u64)bytes) & 3) == 0) {
    for (i64 i = first; i < bytes / 4; i += all) ((int*)to)[i] = ((const int*)from)[i];
  } else {
    for (i64 i = first; i < bytes; i += all) to[i] = from[i];
  }
}

__device__ static void clear(char* to, i64 bytes) {
  const i64 first = blockIdx.x * (i64)blockDim.x + threadIdx.x, all = gridDim.x * (i64)blockDim.x;
  for (i64 i = first; i < bytes; i += all) to[i] = 0;
}

template <typename T> __device__ static void add(char* to, const char* from, i64 bytes) {
  const i64 first = blockIdx.x * (i64)blockDim.x + threadIdx.x, all = gridDim.x * (i64)blockDim.x;
  for (i64 i = first; i < bytes / (i64)sizeof(T); i += all) ((T*)to)[i] += ((const T*)from)[i];
}

extern "C" __global__ void tilework_begin(Table* table) {
  const i64 at = table->at;
  const bool first = at % table->micro == 0;
  if ((int)blockIdx.y < table->num_before) {
    const Copy c = table->copies[blockIdx.y];
    char* to = (char*)c.buffer;
    const char* from = (const char*)c.memory;
    if (c.how == kEvery) move(to, from + at * c.bytes, c.bytes);
    else if (c.how == kAgain || (c.how == kOnce && at == 0)) move(to, from, c.bytes);
    else if (c.how == kStep && first) move(to, from + at / table->micro * c.bytes, c.bytes);
    else if (c.how == kZero && first) clear(to, c.bytes);
  }
  if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0 && table->seed && !table->keep)
    *(u64*)table->seed = next_seed(table->base, table->counter);
}

extern "C" __global__ void tilework_end(Table* table) {
  const i64 at = table->at;
  if ((int)blockIdx.y < table->num_after) {
    const Copy c = table->copies[table->num_before + blockIdx.y];
    const char* from = (const char*)c.buffer;
    char* to = (char*)c.memory;
    if (c.how == kEvery) move(to + at * c.bytes, from, c.bytes);
    else if (c.how == kLast && at + 1 == table->count) move(to, from, c.bytes);
    else if (c.how == kSum && c.type == kFloat32) add<float>(to, from, c.bytes);
    else if (c.how == kSum && c.type == kFloat64) add<double>(to, from, c.bytes);
    else if (c.how == kSum && c.type == kInt64) add<i64>(to, from, c.bytes);
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    if (atomicAdd(&table->ticket, 1) + 1 == (int)(gridDim.x * gridDim.y)) {  // everybody has read `at`
      table->ticket = 0;
      table->at = at + 1;
      if (!table->keep) table->counter += 1;
    }
  }
}
