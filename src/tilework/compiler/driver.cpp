// The driver: the only code between Python and the programs. One call runs any number of steps.
//
// It owns nothing. Buffers belong to the session; handles are made once, when the session starts, and borrowed by the
// programs. A step takes its inputs and hyperparameters to their buffers, runs its programs, and gives its outputs away.
#include <omp.h>
#include <sched.h>
#include <time.h>

#include <cstdint>
#include <cstdio>
#include <cstring>

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#define EXPORT extern "C" __attribute__((visibility("default")))

typedef int (*ProgramFunction)(AtenTensorHandle*, char*, size_t);

struct Program {
  ProgramFunction run;
  AtenTensorHandle* buffers;
};

struct Copy {       // between a session buffer and memory of the caller
  char* buffer;
  int64_t address;  // which of the call's addresses: the caller's memory, `bytes` a slice
  int64_t bytes;
  int32_t how;
  int32_t dtype;    // for sums
};

enum How { kEvery = 0, kLast = 1, kSum = 2, kShared = 3 };  // a slice each; the last only; added up; the same slice each time
enum Sums { kFloat = 0, kDouble = 1, kLong = 2 };

struct Random {     // seed of a micro-batch = splitmix64(base + counter); the counter lives in the session
  uint64_t base;
  uint64_t counter;
  int64_t* seed;
};

struct Call {
  int64_t num_steps;
  int64_t num_micro_batches;  // calls of `micro` to one call of `update`
  Program micro;
  Program update;             // run may be null: nothing after the micro-batches
  Copy* inputs;               // taken before each micro-batch
  int64_t num_inputs;
  Copy* scheduled;            // hyperparameters, taken before each step
  int64_t num_scheduled;
  Copy* outputs;              // given after each micro-batch
  int64_t num_outputs;
  Copy* zeroed;               // gradient buffers, set to zero before the first micro-batch of a step
  int64_t num_zeroed;
  Random* random;             // null: keep the seed, as bwd must
  int64_t steps_done;         // on return: how many whole steps
  const float* loss;          // the loss buffer to watch for values that are no numbers; null: none
  int64_t counts;             // whether its steps count as steps: not those of fwd or bwd alone
};

static int64_t next_seed(Random* r) {
  r->counter += 1;
  uint64_t z = r->base + r->counter * 0x9E3779B97F4A7C15ull;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return (int64_t)((z ^ (z >> 31)) & 0x7FFFFFFFFFFFFFFFull);
}

template <class T>
static void add(const Copy& c, char* outside) {
  const T* from = (const T*)c.buffer;
  T* to = (T*)outside;
  for (int64_t i = 0; i < c.bytes / (int64_t)sizeof(T); ++i) to[i] += from[i];
}

static inline void give(const Copy& c, char* outside, int64_t at, bool last) {
  if (c.how == kEvery) {
    memcpy(outside + at * c.bytes, c.buffer, c.bytes);
  } else if (c.how == kLast) {
    if (last) memcpy(outside, c.buffer, c.bytes);
  } else if (c.dtype == kFloat) {
    add<float>(c, outside);
  } else if (c.dtype == kDouble) {
    add<double>(c, outside);
  } else {
    add<int64_t>(c, outside);
  }
}

// Threads keep to their cores. Without that the system may let two threads of a step share one core while another core
// idles, for seconds: twice the time. Only workers are bound; the calling thread is the user's, and threads that he starts
// would inherit a binding. It is moved away from a worker's core when it is found there, and stays free.
static cpu_set_t worker_cores, first_core;
static bool pinned = false;

EXPORT void tilework_pin(const int32_t* cores, int32_t count) {
  CPU_ZERO(&worker_cores);
  CPU_ZERO(&first_core);
  CPU_SET(cores[0], &first_core);
  for (int i = 1; i < count; ++i) CPU_SET(cores[i], &worker_cores);
#pragma omp parallel num_threads(count)
  {
    const int i = omp_get_thread_num();
    if (i > 0 && i < count) {
      cpu_set_t own;
      CPU_ZERO(&own);
      CPU_SET(cores[i], &own);
      sched_setaffinity(0, sizeof(own), &own);
    }
  }
  pinned = true;
}

static void leave_worker_core() {
  const int core = sched_getcpu();
  if (core < 0 || !CPU_ISSET(core, &worker_cores)) return;
  cpu_set_t before;
  if (sched_getaffinity(0, sizeof(before), &before)) return;
  sched_setaffinity(0, sizeof(first_core), &first_core);
  sched_setaffinity(0, sizeof(before), &before);
}

// The page: what this process is doing, for everybody to see (tiles/page.py has its layout). Two clock readings a step.
enum Field { kSequence = 1, kState = 2, kSince = 3, kFirst = 4, kSteps = 10, kLoss = 11 };
enum State { kExec = 1, kArguments = 3 };
static int64_t* page = nullptr;
static const float* shown_loss = nullptr;

EXPORT void tilework_meter(int64_t* where, const float* loss) {
  page = where;
  shown_loss = loss;
}

static inline void enter(int64_t state) {
  if (!page) return;
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  const int64_t now = t.tv_sec * 1000000000ll + t.tv_nsec;
  volatile int64_t* p = page;
  p[kSequence] = p[kSequence] + 1;
  __atomic_thread_fence(__ATOMIC_RELEASE);
  p[kFirst + p[kState]] = p[kFirst + p[kState]] + now - p[kSince];
  p[kState] = state;
  p[kSince] = now;
  __atomic_thread_fence(__ATOMIC_RELEASE);
  p[kSequence] = p[kSequence] + 1;
}

struct Metered {  // back to the state from before, however the call ends
  int64_t before;
  Metered() : before(page ? page[kState] : 0) { enter(kArguments); }
  ~Metered() {
    enter(before);
    if (page && shown_loss) {
      const double loss = *shown_loss;
      memcpy(page + kLoss, &loss, sizeof(loss));
    }
  }
};

// 0: done. 1: a program failed, `error` says why. 2: the loss is not a number.
EXPORT int tilework_call(Call* call, char** addresses, char* error, size_t size) {
  if (pinned) leave_worker_core();
  Metered metered;
  call->steps_done = 0;
  int64_t at = 0;
  const int64_t total = call->num_steps * call->num_micro_batches;
  for (int64_t step = 0; step < call->num_steps; ++step) {
    for (int64_t i = 0; i < call->num_scheduled; ++i) {
      const Copy& c = call->scheduled[i];
      memcpy(c.buffer, addresses[c.address] + step * c.bytes, c.bytes);
    }
    for (int64_t i = 0; i < call->num_zeroed; ++i) memset(call->zeroed[i].buffer, 0, call->zeroed[i].bytes);
    for (int64_t micro = 0; micro < call->num_micro_batches; ++micro, ++at) {
      for (int64_t i = 0; i < call->num_inputs; ++i) {
        const Copy& c = call->inputs[i];
        if (c.how == kEvery)
          memcpy(c.buffer, addresses[c.address] + at * c.bytes, c.bytes);
        else if (at == 0)
          memcpy(c.buffer, addresses[c.address], c.bytes);
      }
      if (call->random) *call->random->seed = next_seed(call->random);
      enter(kExec);
      if (call->micro.run(call->micro.buffers, error, size)) return 1;
      enter(kArguments);
      for (int64_t i = 0; i < call->num_outputs; ++i)
        give(call->outputs[i], addresses[call->outputs[i].address], at, at + 1 == total);
      if (call->loss && !(*call->loss == *call->loss)) return 2;
    }
    if (call->update.run) {
      enter(kExec);
      if (call->update.run(call->update.buffers, error, size)) return 1;
      enter(kArguments);
    }
    call->steps_done = step + 1;
    if (page) page[kSteps] += call->counts;
  }
  return 0;
}

EXPORT int tilework_tensor(void* data, int64_t dims, const int64_t* shape, const int64_t* stride, int32_t dtype,
                           AtenTensorHandle* handle) {
  return aoti_torch_create_tensor_from_blob(data, dims, shape, stride, 0, dtype, aoti_torch_device_type_cpu(), 0, handle);
}

EXPORT void tilework_free(AtenTensorHandle handle) { aoti_torch_delete_tensor_object(handle); }

EXPORT int32_t tilework_dtype(const char* name) {
#define DTYPE(text, code) if (!strcmp(name, text)) return aoti_torch_dtype_##code();
  DTYPE("float32", float32) DTYPE("float64", float64) DTYPE("bfloat16", bfloat16) DTYPE("float16", float16)
  DTYPE("int64", int64) DTYPE("int32", int32) DTYPE("int16", int16) DTYPE("int8", int8) DTYPE("uint8", uint8)
  DTYPE("bool", bool) DTYPE("complex64", complex64)
  return -1;
}
