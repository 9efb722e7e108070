// The driver: the only code between Python and the programs. One call runs any number of steps.
//
// It owns nothing. Buffers belong to the session; handles are made once, when the session starts, and borrowed by the
// programs. A step takes its inputs and hyperparameters to their buffers, runs its programs, and gives its outputs away.
#include <fcntl.h>
#include <omp.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#define EXPORT extern "C" __attribute__((visibility("default")))

typedef int (*ProgramFunction)(AtenTensorHandle*, char*, size_t);

struct Program {
  ProgramFunction run;
  AtenTensorHandle* buffers;
  int64_t parallel;  // whether more than one thread pays
  void (*alone)(int);  // kernels/team.cpp: the loops of so many threads on the calling one; 0: on all of them
};

struct Copy {       // between a session buffer and memory of the caller
  char* buffer;
  int64_t address;  // which of the call's addresses: the caller's memory, `bytes` a slice
  int64_t bytes;
  int32_t how;
  int32_t dtype;    // for sums, and of a loss that is watched
};

// A slice each; the last only; added up; the same slice for all, taken once; the same, taken again for each micro-batch because a
// program changes the buffer.
enum How { kEvery = 0, kLast = 1, kSum = 2, kShared = 3, kAgain = 4 };
enum Dtype { kFloat = 0, kDouble = 1, kLong = 2, kBfloat16 = 3, kHalf = 4 };

struct Backup {     // a buffer, and memory to keep it in while a step runs
  char* buffer;
  char* memory;
  int64_t bytes;
};

struct Random {     // seed of a micro-batch = splitmix64(base + counter); the counter lives in the session
  uint64_t base;
  uint64_t counter;
  int64_t* seed;
};

struct Reduction {  // of gradients over replicas (exchange.cpp), between micro-batches and update; finish null: one replica alone
  void (*begin)(void*);  // before the last micro-batch
  int (*finish)(void*, char*, size_t);
  void* exchange;
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
  const Copy* watched;        // losses: where one is not a number, the call ends, and its last step has changed nothing
  int64_t num_watched;
  const Backup* restored;     // what that step is undone with
  int64_t num_restored;
  int64_t counts;             // whether its steps count as steps: not those of fwd or bwd alone
  const float* shown_loss;    // the loss that its programs compute, for the page; null: none
  Reduction reduction;
};

// runtime/devices/cpu.py has the same numbers, and refuses a driver with others. Count the first one up, here and there, where a
// field or an enum changes its meaning.
EXPORT const int64_t tilework_driver_layout[] = {4, sizeof(Program), sizeof(Copy), sizeof(Backup), sizeof(Random), sizeof(Call)};

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

// By the bits, whatever the compiler takes floating-point numbers to be: above infinity, but for the sign.
template <class Bits>
static bool has_nan(const Copy& c, Bits infinity) {
  for (int64_t i = 0; i < c.bytes; i += sizeof(Bits)) {
    Bits value;
    memcpy(&value, c.buffer + i, sizeof(Bits));
    if ((Bits)(value << 1) > (Bits)(infinity << 1)) return true;
  }
  return false;
}

static bool is_nan(const Copy& c) {
  switch (c.dtype) {
    case kFloat: return has_nan<uint32_t>(c, 0x7F800000u);
    case kDouble: return has_nan<uint64_t>(c, 0x7FF0000000000000ull);
    case kBfloat16: return has_nan<uint16_t>(c, 0x7F80);
    case kHalf: return has_nan<uint16_t>(c, 0x7C00);
  }
  return false;
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

// MKL's own setting of threads for the calling thread; null where BLAS is another library.
extern "C" __attribute__((weak)) int MKL_Set_Num_Threads_Local(int);

// Whether other processes want the cores. Threads that wait for each other then do worse than one alone: see kernels/team.cpp. The
// system says for each thread how long it wanted a core and had none. A look takes a microsecond a thread; after a while alone, all
// threads are tried again. One for all sessions of this library.
class Neighbours {
 public:
  bool asked = false;  // whether somebody wants it looked for
  bool crowded() const { return alone; }
  void look() {
    const int64_t now = nanoseconds();
    if (now - looked < kLook) return;
    looked = now;
    if (alone) {
      if (now < until) return;
      alone = false;  // try again
      windows = waited = 0;
      measure(nullptr);
      return;
    }
    double share = 0;
    if (!measure(&share)) return;
    windows += 1;
    waited = share > kShare ? waited + 1 : 0;
    if (waited >= 2) {
      alone = true;
      until = now + patience;
      patience = std::min(2 * patience, kLongest);
    } else if (windows > 50) {
      patience = kShortest;
    }
  }

 private:
  static constexpr int64_t kLook = 10000000, kShortest = 500000000, kLongest = 8000000000;  // ns
  static constexpr double kShare = 0.2;  // of its time that a thread waited for a core
  static constexpr int kMost = 16;       // threads that are looked at

  static int64_t nanoseconds() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000ll + t.tv_nsec;
  }
  // The largest share of time that one of the threads waited since the last look. False: there is nothing to compare with.
  bool measure(double* share) {
    const pid_t self = (pid_t)syscall(SYS_gettid);
    if (self != caller) find(self);
    bool known = false;
    for (int i = 0; i < count; ++i) {
      char text[96] = {};
      long long run = 0, wait = 0;
      if (files[i] < 0 || pread(files[i], text, sizeof(text) - 1, 0) <= 0 || sscanf(text, "%lld %lld", &run, &wait) != 2) continue;
      const int64_t ran = run - runs[i], waited = wait - waits[i];
      if (share && have && ran + waited > kLook / 2) {
        known = true;
        *share = std::max(*share, (double)waited / (double)(ran + waited));
      }
      runs[i] = run, waits[i] = wait;
    }
    const bool compared = have && known;
    have = true;
    return compared;
  }
  // The threads of OpenMP's team, the caller among them.
  void find(pid_t self) {
    for (int i = 0; i < count; ++i)
      if (files[i] >= 0) close(files[i]);
    pid_t found[kMost] = {};
#pragma omp parallel
    if (omp_get_thread_num() < kMost) found[omp_get_thread_num()] = (pid_t)syscall(SYS_gettid);
    count = 0;
    for (pid_t thread : found) {
      char path[64];
      snprintf(path, sizeof(path), "/proc/self/task/%d/schedstat", (int)thread);
      if (thread) files[count++] = open(path, O_RDONLY | O_CLOEXEC);
    }
    caller = self;
    have = false;
  }

  bool alone = false, have = false;
  int64_t looked = 0, until = 0, patience = kShortest;
  int windows = 0, waited = 0, count = 0;
  pid_t caller = 0;
  int files[kMost];
  int64_t runs[kMost], waits[kMost];
};

static Neighbours neighbours;

EXPORT void tilework_look_for_neighbours(int32_t on) { neighbours.asked = on; }
EXPORT int32_t tilework_crowded() { return neighbours.crowded(); }

// As many threads as pay: one, or all that the caller allows. Never some of them: the OpenMP library ends threads that a smaller team
// leaves over, and to make them anew for the next one takes longer than most steps.
class Threads {
 public:
  Threads(const Program& micro, const Program& update)
      : programs{&micro, &update}, allowed(omp_get_max_threads()), parallel(micro.parallel || (update.run && update.parallel)) {
    if (allowed > 1 && !parallel) one();
  }
  ~Threads() {
    if (alone) together();
    if (single) all();
  }
  void before_step() {
    if (!parallel || allowed == 1 || !neighbours.asked) return;
    neighbours.look();
    if (neighbours.crowded() == alone) return;
    alone ? together() : apart();
  }

 private:
  void one() {  // libraries too
    single = true;
    omp_set_num_threads(1);
    if (MKL_Set_Num_Threads_Local) before = MKL_Set_Num_Threads_Local(1);
  }
  void all() {
    single = false;
    omp_set_num_threads(allowed);
    if (MKL_Set_Num_Threads_Local) MKL_Set_Num_Threads_Local(before);
  }
  void apart() {
    one();
    alone = true;
    for (const Program* p : programs)
      if (p->run && p->alone) p->alone(allowed);
  }
  void together() {
    for (const Program* p : programs)
      if (p->run && p->alone) p->alone(0);
    alone = false;
    all();
  }

  const Program* programs[2];
  const int allowed;
  const bool parallel;
  bool single = false, alone = false;
  int before = 0;
};

// The page: what this process is doing, for everybody to see (tiles/page.py has its layout). Two clock readings a step.
// A slot is one session's, which makes one call at a time. The record is the process's: all of its threads write there, those of
// other libraries like this one too, so a lock guards it. It is held for some 30 ns. Who finds it taken soon sleeps: its holder may
// have lost the CPU, and may be less urgent than we are.
enum SlotField { kState = 1, kSince = 2, kSteps = 3, kLoss = 4 };
enum RecordField { kSequence = 0, kLock = 1, kCounts = 2, kNow = 3, kNowSince = 4, kFirst = 6 };
enum State { kExec = 1, kArguments = 3, kReduce = 6 };
enum { kBits = 10 };  // of a state in the counts: how many sessions are in it
static int64_t* record = nullptr;
static int64_t* slot = nullptr;

static inline int64_t one(int64_t state) { return state ? 1ll << kBits * (state - 1) : 0; }

static void lock_record(int64_t* r) {
  for (int tries = 0; __atomic_exchange_n(r + kLock, 1, __ATOMIC_ACQUIRE); ++tries) {
    const timespec moment = {0, 10000};
    if (tries > 50) nanosleep(&moment, nullptr);
  }
}

static inline int64_t enter(int64_t* record, int64_t* slot, int64_t state) {
  lock_record(record);
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);  // with the lock, so that times never run backwards
  const int64_t now = t.tv_sec * 1000000000ll + t.tv_nsec;
  volatile int64_t *r = record, *s = slot;
  const int64_t before = s[kState], was = r[kNow];
  const int64_t counts = r[kCounts] + one(state) - one(before);
  const int64_t first = counts ? __builtin_ctzll(counts) / kBits + 1 : 0;  // the state of the process
  const int64_t sequence = r[kSequence] | 1;
  r[kSequence] = sequence;
  __atomic_thread_fence(__ATOMIC_RELEASE);
  s[kSince] = now;
  s[kState] = state;
  r[kCounts] = counts;
  if (first != was) {
    r[kFirst + was] = r[kFirst + was] + now - r[kNowSince];
    r[kNowSince] = now;
    r[kNow] = first;
  }
  __atomic_thread_fence(__ATOMIC_RELEASE);
  r[kSequence] = sequence + 1;
  __atomic_store_n(record + kLock, 0, __ATOMIC_RELEASE);
  return before;
}

// For Python, which has no such lock. When the page's layout changes, so do the names of these two: Python counts for a driver
// that does not have them.
EXPORT int64_t tilework_enter(int64_t* record, int64_t* slot, int64_t state) { return enter(record, slot, state); }

// Where this library's calls are counted. Null: nowhere.
EXPORT void tilework_count_at(int64_t* process_record, int64_t* session_slot) {
  record = process_record;
  slot = session_slot;
}

static inline void enter(int64_t state) {
  if (slot) enter(record, slot, state);
}

struct Metered {  // back to the state from before, however the call ends
  int64_t before;
  const float* loss = nullptr;  // set once it has been computed
  Metered() : before(slot ? slot[kState] : 0) { enter(kArguments); }
  ~Metered() {
    enter(before);
    if (slot && loss) {
      const double value = *loss;
      memcpy(slot + kLoss, &value, sizeof(value));
    }
  }
};

// The step at fault, as if it had not begun. What it gave to the caller stays: the call fails.
static int undo(Call* call, uint64_t drawn) {
  for (int64_t i = 0; i < call->num_restored; ++i) {
    const Backup& b = call->restored[i];
    memcpy(b.buffer, b.memory, b.bytes);
  }
  if (call->random) call->random->counter = drawn;
  return 2;
}

// 0: done. 1: a program failed, `error` says why. 2: a loss is not a number. 3: other replicas did not come, `error` says which.
EXPORT int tilework_call(Call* call, char** addresses, char* error, size_t size) {
  if (pinned && !neighbours.crowded()) leave_worker_core();
  Metered metered;
  call->steps_done = 0;
  int64_t at = 0;
  const int64_t total = call->num_steps * call->num_micro_batches;
  Threads threads(call->micro, call->update);
  for (int64_t step = 0; step < call->num_steps; ++step) {
    threads.before_step();
    const uint64_t drawn = call->random ? call->random->counter : 0;
    for (int64_t i = 0; i < call->num_restored; ++i) {
      const Backup& b = call->restored[i];
      memcpy(b.memory, b.buffer, b.bytes);
    }
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
        else if (at == 0 || c.how == kAgain)
          memcpy(c.buffer, addresses[c.address], c.bytes);
      }
      if (call->random) *call->random->seed = next_seed(call->random);
      if (call->reduction.finish && micro + 1 == call->num_micro_batches) call->reduction.begin(call->reduction.exchange);
      enter(kExec);
      if (call->micro.run(call->micro.buffers, error, size)) return 1;
      enter(kArguments);
      metered.loss = call->shown_loss;
      for (int64_t i = 0; i < call->num_outputs; ++i)
        give(call->outputs[i], addresses[call->outputs[i].address], at, at + 1 == total);
      for (int64_t i = 0; i < call->num_watched; ++i)
        if (is_nan(call->watched[i])) return undo(call, drawn);
    }
    if (call->reduction.finish) {
      enter(kReduce);
      if (call->reduction.finish(call->reduction.exchange, error, size)) return 3;
    }
    if (call->update.run) {
      enter(kExec);
      if (call->update.run(call->update.buffers, error, size)) return 1;
      enter(kArguments);
    }
    call->steps_done = step + 1;
    if (slot) slot[kSteps] += call->counts;
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
  DTYPE("bool", bool) DTYPE("complex64", complex64) DTYPE("complex128", complex128)
  return -1;
}
