// A program's parallel loops on one thread, with the numbers of many.
//
// Where other processes want the cores, threads that wait for each other lose most of their time: one of them has no core, the others
// spin. A program then does better on one thread. Sums are divided by threads, so with fewer threads their last bits would change;
// here every thread of a team still does its own share, one after the other on the calling thread, and the bits stay.
//
// The linker sends the program's calls of OpenMP here (--wrap, toolchain.py). As long as nobody has called tilework_alone, they go on
// to OpenMP. Otherwise each member of a team has a stack of its own; at a barrier the next one goes on.
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <memory>
#include <new>
#include <vector>

extern "C" {
void __real_GOMP_parallel(void (*)(void*), void*, unsigned, unsigned);
void __real_GOMP_barrier();
bool __real_GOMP_single_start();
int __real_omp_get_thread_num();
int __real_omp_get_num_threads();
int __real_omp_get_max_threads();
int __real_omp_in_parallel();
}

namespace {

constexpr size_t kStack = 1 << 20;  // bytes; loops keep little there

struct Member {
  ucontext_t context;
  void* stack;
  bool done = false;
  Member() : stack(mmap(nullptr, kStack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_STACK, -1, 0)) {
    if (stack == MAP_FAILED) throw std::bad_alloc();
    getcontext(&context);
  }
  ~Member() { munmap(stack, kStack); }
};

struct Team {
  int size = 0;                // as how many threads; 0: OpenMP's own are used
  int id = 0, count = 0;       // of the member that runs now; count 0: none does
  bool inner = false;          // a team of one within a member's work
  void (*body)(void*) = nullptr;
  void* data = nullptr;
  ucontext_t caller;
  std::vector<std::unique_ptr<Member>> members;

  void run() {
    while ((int)members.size() < count) members.push_back(std::make_unique<Member>());
    for (int i = 0; i < count; ++i) {
      Member& m = *members[i];
      m.done = false;
      m.context.uc_stack = {m.stack, 0, kStack};
      m.context.uc_link = &caller;
      makecontext(&m.context, work, 0);
    }
    for (int left = count; left > 0;)  // a round takes every member to its next barrier
      for (id = 0; id < count; ++id)
        if (Member& m = *members[id]; !m.done) {
          swapcontext(&caller, &m.context);
          left -= m.done;
        }
    id = count = 0;
  }
  static void work();
};

thread_local Team team;

void Team::work() {
  team.body(team.data);
  team.members[team.id]->done = true;
}

bool divided() { return team.count > 0 && !team.inner; }

}  // namespace

extern "C" {

// The calling thread's programs run on it alone, as `size` threads would; 0: on OpenMP's threads.
__attribute__((visibility("default"))) void tilework_alone(int size) { team.size = size; }

void __wrap_GOMP_parallel(void (*body)(void*), void* data, unsigned threads, unsigned flags) {
  if (team.size == 0) return __real_GOMP_parallel(body, data, threads, flags);
  const int count = std::min<int>(threads ? threads : team.size, team.size);
  if (team.count > 0 || count == 1) {  // within a loop of its own, or a loop for one
    const int id = team.id, before = team.count;
    const bool inner = team.inner;
    if (before == 0) team.id = 0, team.count = 1;
    team.inner = true;
    body(data);
    team.id = id, team.count = before, team.inner = inner;
    return;
  }
  team.body = body, team.data = data, team.count = count;
  team.run();
}

void __wrap_GOMP_barrier() {
  if (team.count == 0) return __real_GOMP_barrier();
  if (divided()) swapcontext(&team.members[team.id]->context, &team.caller);
}

bool __wrap_GOMP_single_start() { return team.count == 0 ? __real_GOMP_single_start() : !divided() || team.id == 0; }
int __wrap_omp_get_thread_num() { return team.count == 0 ? __real_omp_get_thread_num() : divided() ? team.id : 0; }
int __wrap_omp_get_num_threads() { return team.count == 0 ? __real_omp_get_num_threads() : divided() ? team.count : 1; }
int __wrap_omp_get_max_threads() { return team.size ? team.size : __real_omp_get_max_threads(); }
int __wrap_omp_in_parallel() { return team.count > 0 || __real_omp_in_parallel(); }
}
