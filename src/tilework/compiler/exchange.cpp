// Gradients of the replicas on one machine, made one through shared memory, between the backward pass and the update.
//
// Each replica's gradients lie in its own part of one segment that all of them have mapped (parallel/segment.py). A replica sums a
// slice of everybody's gradients, in the order of the ranks, and writes the result to everybody: two barriers, no copy in between,
// the same bits everywhere. Where replicas are on several machines, a function of the caller sums each slice over the machines.
//
// With a courier, a thread of its own, a bucket is on its way as soon as the backward pass has made it; otherwise all go together
// when it is done.
#include <errno.h>
#include <linux/futex.h>
#include <omp.h>
#include <pthread.h>
#include <signal.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <thread>
#include <vector>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

// ---- the segment: parallel/segment.py lays it out, zeroed ----

struct alignas(64) Seat {        // of one replica
  std::atomic<int64_t> arrived;  // at so many barriers
  std::atomic<int64_t> step;     // what it is at, for whoever asks: steps done,
  std::atomic<int64_t> stage;    // and the collective
  int64_t pid;                   // 0: not known to the others (another namespace)
  int64_t rank;                  // among all machines
};

struct alignas(64) Header {
  std::atomic<uint32_t> arrivals;  // of all replicas at all barriers
  std::atomic<uint32_t> sleepers;
  std::atomic<int64_t> failed;     // 1 + the seat of whoever gave up first
};

enum Stage { kAway = 0, kGradients = 1, kSums = 2, kAcross = 3, kStatistics = 4 };

struct Bucket {
  int64_t offset;  // bytes, from the start of a replica's part
  int64_t count;   // elements
  int32_t dtype;   // as in driver.cpp
};

enum Dtype { kFloat = 0, kDouble = 1, kLong = 2, kBfloat16 = 3, kHalf = 4 };
constexpr int64_t kBlock = 4096;  // elements that are summed at a time: they stay in the first-level cache
constexpr int64_t kLine = 64;     // elements: slices begin at multiples of it
constexpr int64_t kWorthAThread = 1 << 17;  // elements

// Sums over machines, in place; called without locks, with the slice that this replica has summed. 0: done.
typedef int (*Across)(int64_t bucket, void* data, int64_t count);

struct Settings {  // parallel/exchange.py fills it in
  char* segment;
  int64_t seat, size;          // of how many replicas on this machine
  int64_t parts, part_bytes;   // where the first replica's gradients begin, and how far they are apart
  const Bucket* buckets;
  int64_t num_buckets;
  double scale;                // of the sum: 1, or one by the number of all replicas
  int64_t timeout_ns, spin_ns;
  Across across;               // null: all replicas are on this machine
  const int64_t* ready_after;  // of each bucket, the call of the program's after which it is complete; null: no courier
};

int64_t nanoseconds() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000ll + t.tv_nsec;
}

long futex(std::atomic<uint32_t>* word, int op, uint32_t value, const timespec* time) {
  return syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), op, value, time, nullptr, 0);
}

float widened(uint16_t v, bool half) {
  uint32_t bits;
  if (!half) {
    bits = (uint32_t)v << 16;
  } else {
    const uint32_t sign = (uint32_t)(v & 0x8000) << 16, exponent = v >> 10 & 31, fraction = v & 0x3ff;
    if (exponent == 31) {
      bits = sign | 0x7f800000 | fraction << 13;
    } else if (exponent) {
      bits = sign | (exponent + 112) << 23 | fraction << 13;
    } else {
      const float small = (float)fraction * 0x1p-24f;
      return sign ? -small : small;
    }
  }
  float f;
  memcpy(&f, &bits, 4);
  return f;
}

uint16_t narrowed(float f, bool half) {  // to the nearest, ties to even
  uint32_t bits;
  memcpy(&bits, &f, 4);
  if (!half) return f != f ? (uint16_t)(bits >> 16 | 0x40) : (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
  const _Float16 h = (_Float16)f;
  uint16_t v;
  memcpy(&v, &h, 2);
  return v;
}

struct Failure {};

class Exchange {
 public:
  explicit Exchange(const Settings& s) : s(s), buckets(s.buckets, s.buckets + s.num_buckets) {
    if (s.ready_after) ready_after.assign(s.ready_after, s.ready_after + s.num_buckets);
    header = reinterpret_cast<Header*>(s.segment);
    seats = reinterpret_cast<Seat*>(s.segment + sizeof(Header));
    if (!ready_after.empty()) courier = std::thread([this] { carry(); });
  }
  ~Exchange() {
    if (courier.joinable()) {
      closing = true;
      begun.fetch_add(1);
      futex(&begun, FUTEX_WAKE_PRIVATE, 1, nullptr);
      courier.join();
    }
  }

  // ---- the caller's thread ----

  void begin() {  // before the last micro-batch of a step
    if (!courier.joinable()) return;
    ready.store(0, std::memory_order_relaxed);
    done.store(0, std::memory_order_relaxed);
    begun.fetch_add(1, std::memory_order_release);
    futex(&begun, FUTEX_WAKE_PRIVATE, 1, nullptr);
    active = true;
  }
  void after_call(int64_t call) {  // of the program that computes gradients
    if (!active) return;
    uint32_t now = ready.load(std::memory_order_relaxed);
    const uint32_t before = now;
    while (now < buckets.size() && ready_after[now] <= call) ++now;
    if (now > before) tell(now);
  }
  // Gradients are there; when this returns they are everybody's. 0: done. 1: `error` says what happened.
  int finish(char* error, size_t size) {
    problem[0] = 0;
    seats[s.seat].step.fetch_add(1, std::memory_order_relaxed);
    if (active) {
      tell(buckets.size());
      wait_for_courier();
      active = false;
    } else {
      try {
        together(0, buckets.size());
      } catch (const Failure&) {
      }
    }
    if (!problem[0]) return 0;
    snprintf(error, size, "%s", problem);
    return 1;
  }
  // The sum of a few numbers of every replica, in place, in the middle of a program. Everybody adds up all of them, in the order of
  // the ranks. The bucket has two halves that are used by turns, so that one barrier is enough: nobody writes to a half that
  // another still reads, which would have to be two sums behind.
  template <class T>
  int sum_of_few(T* data, int64_t count, char* error, size_t size) {
    const int64_t half = buckets[0].count * (int64_t)sizeof(double) / 2, room = half / (int64_t)sizeof(T);
    problem[0] = 0;
    seats[s.seat].step.fetch_add(1, std::memory_order_relaxed);
    try {
      for (int64_t at = 0; at < count; at += room, ++sums_made) {
        const int64_t n = std::min(room, count - at), offset = buckets[0].offset + sums_made % 2 * half;
        memcpy(part(s.seat) + offset, data + at, n * sizeof(T));
        barrier(kStatistics);
        memcpy(data + at, part(0) + offset, n * sizeof(T));
        for (int64_t i = 1; i < s.size; ++i) {
          const T* other = reinterpret_cast<const T*>(part(i) + offset);
          for (int64_t k = 0; k < n; ++k) data[at + k] += other[k];
        }
        if (s.across && s.across(sizeof(T) == sizeof(double), data + at, n)) {
          snprintf(problem, sizeof(problem), "the sum over the machines failed");
          give_up();
          throw Failure();
        }
      }
    } catch (const Failure&) {
      snprintf(error, size, "%s", problem);
      return 1;
    }
    return 0;
  }
  void give_up() {
    int64_t nobody = 0;
    header->failed.compare_exchange_strong(nobody, s.seat + 1);
    futex(&header->arrivals, FUTEX_WAKE, INT32_MAX, nullptr);
  }

 private:
  char* part(int64_t seat) const { return s.segment + s.parts + seat * s.part_bytes; }

  // ---- the courier ----

  void tell(uint32_t now) {
    ready.store(now, std::memory_order_release);
    futex(&ready, FUTEX_WAKE_PRIVATE, 1, nullptr);
  }
  void wait_for_courier() {
    for (uint32_t now; (now = done.load(std::memory_order_acquire)) < buckets.size() + 1;)
      futex(&done, FUTEX_WAIT_PRIVATE, now, nullptr);
  }
  void carry() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, nullptr);  // signals are the main thread's
    omp_set_num_threads(1);
    for (uint32_t seen = 0;;) {
      for (uint32_t now; (now = begun.load(std::memory_order_acquire)) == seen;) futex(&begun, FUTEX_WAIT_PRIVATE, seen, nullptr);
      seen = begun.load(std::memory_order_acquire);
      if (closing) return;
      size_t at = 0;
      while (at < buckets.size()) {
        uint32_t there;
        while ((there = ready.load(std::memory_order_acquire)) <= at) futex(&ready, FUTEX_WAIT_PRIVATE, there, nullptr);
        if (!problem[0]) {
          try {
            // One bucket at a time: how many are ready by now differs from replica to replica.
            together(at, at + 1);
          } catch (const Failure&) {
          }
        }
        at += 1;
      }
      done.store(buckets.size() + 1, std::memory_order_release);
      futex(&done, FUTEX_WAKE_PRIVATE, 1, nullptr);
    }
  }

  // ---- with the others ----

  void together(size_t from, size_t to) {
    barrier(kGradients);
    for (size_t b = from; b < to; ++b) sum(b);
    barrier(kSums);
  }

  void sum(size_t b) {
    const Bucket& bucket = buckets[b];
    const int64_t lines = (bucket.count + kLine - 1) / kLine;
    const int64_t begin = std::min(bucket.count, lines * s.seat / s.size * kLine);
    const int64_t end = std::min(bucket.count, lines * (s.seat + 1) / s.size * kLine);
    if (begin == end && !s.across) return;
    switch (bucket.dtype) {
      case kFloat: slice<float, float>(b, begin, end); break;
      case kDouble: slice<double, double>(b, begin, end); break;
      case kLong: slice<int64_t, int64_t>(b, begin, end); break;
      default: slice<uint16_t, float>(b, begin, end); break;
    }
  }

  template <class T, class Sum>
  void slice(size_t b, int64_t begin, int64_t end) {
    const Bucket& bucket = buckets[b];
    std::vector<T*> all(s.size);
    for (int64_t i = 0; i < s.size; ++i) all[i] = reinterpret_cast<T*>(part(i) + bucket.offset);
    T* own = all[s.seat];
    const bool half = bucket.dtype == kHalf;
    const int threads = omp_in_parallel() ? 1 : (int)std::max<int64_t>(1, std::min<int64_t>(omp_get_max_threads(), (end - begin) / kWorthAThread));
    const bool far = s.across != nullptr;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t at = begin; at < end; at += kBlock) {
      const int64_t count = std::min(kBlock, end - at);
      Sum total[kBlock];
      for (int64_t k = 0; k < count; ++k) total[k] = value<Sum>(all[0][at + k], half);
      for (int64_t i = 1; i < s.size; ++i)
        for (int64_t k = 0; k < count; ++k) total[k] += value<Sum>(all[i][at + k], half);
      if (far) {
        for (int64_t k = 0; k < count; ++k) store(own[at + k], total[k], half);
      } else {
        give(all, at, count, total, half);
      }
    }
    if (!far) return;
    seats[s.seat].stage.store(kAcross, std::memory_order_relaxed);
    if (s.across((int64_t)b, own + begin, end - begin)) {
      snprintf(problem, sizeof(problem), "the sum over the machines failed");
      give_up();
      throw Failure();
    }
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t at = begin; at < end; at += kBlock) {
      const int64_t count = std::min(kBlock, end - at);
      Sum total[kBlock];
      for (int64_t k = 0; k < count; ++k) total[k] = value<Sum>(own[at + k], half);
      give(all, at, count, total, half);
    }
  }

  template <class Sum, class T>
  static Sum value(T v, bool half) {
    if constexpr (std::is_same_v<T, uint16_t>) return widened(v, half);
    else return v;
  }
  template <class T, class Sum>
  static void store(T& to, Sum v, bool half) {
    if constexpr (std::is_same_v<T, uint16_t>) to = narrowed(v, half);
    else to = v;
  }
  template <class T, class Sum>
  void give(const std::vector<T*>& all, int64_t at, int64_t count, Sum* total, bool half) {
    T made[kBlock];
    if (s.scale != 1 && !std::is_same_v<T, int64_t>)
      for (int64_t k = 0; k < count; ++k) total[k] = (Sum)(total[k] * (Sum)s.scale);
    for (int64_t k = 0; k < count; ++k) store(made[k], total[k], half);
    for (T* to : all) memcpy(to + at, made, count * sizeof(T));
  }

  // Everybody has come here. Waiting threads spin for a moment, then sleep.
  void barrier(int64_t stage) {
    if (s.size == 1) return;
    Seat& own = seats[s.seat];
    own.stage.store(stage, std::memory_order_relaxed);
    rounds += 1;
    own.arrived.store(rounds, std::memory_order_release);
    const uint32_t target = (uint32_t)(rounds * s.size);
    const uint32_t came = header->arrivals.fetch_add(1, std::memory_order_acq_rel) + 1;
    if (came == target) {
      if (header->sleepers.load(std::memory_order_acquire)) futex(&header->arrivals, FUTEX_WAKE, INT32_MAX, nullptr);
    } else {
      wait(target, stage);
    }
    if (header->failed.load(std::memory_order_acquire)) fail_with_others();
    own.stage.store(kAway, std::memory_order_relaxed);
  }

  bool complete(uint32_t target) const { return (int32_t)(header->arrivals.load(std::memory_order_acquire) - target) >= 0; }

  void wait(uint32_t target, int64_t stage) {
    const int64_t began = nanoseconds();
    for (int64_t tries = 0; !complete(target); ++tries) {
#if defined(__x86_64__)
      __builtin_ia32_pause();
#endif
      if (tries % 64 == 63 && nanoseconds() - began > s.spin_ns) break;
    }
    while (!complete(target)) {
      header->sleepers.fetch_add(1, std::memory_order_acq_rel);
      const uint32_t now = header->arrivals.load(std::memory_order_acquire);
      const timespec moment = {0, 100000000};
      if ((int32_t)(now - target) < 0 && !header->failed.load()) futex(&header->arrivals, FUTEX_WAIT, now, &moment);
      header->sleepers.fetch_sub(1, std::memory_order_acq_rel);
      if (complete(target)) break;
      if (header->failed.load(std::memory_order_acquire)) fail_with_others();
      look(nanoseconds() - began, stage);
    }
  }

  static const char* name(int64_t stage) {
    return stage == kGradients ? "reduce (gradients)" : stage == kSums ? "reduce (sums)" : stage == kAcross ? "reduce (over the machines)"
           : stage == kStatistics ? "batch normalization (statistics of all replicas)" : "its own step";
  }

  // Who has not come yet: is it still there, and has it had time enough?
  void look(int64_t waited, int64_t stage) {
    for (int64_t i = 0; i < s.size; ++i) {
      const Seat& other = seats[i];
      if (i == s.seat || other.arrived.load(std::memory_order_acquire) >= rounds) continue;
      const bool gone = other.pid && kill((pid_t)other.pid, 0) && errno == ESRCH;
      if (!gone && waited < s.timeout_ns) continue;
      const long long its = other.rank, process = other.pid, mine = seats[s.seat].rank, step = seats[s.seat].step.load();
      const char *where = name(stage), *unit = stage == kStatistics ? "sum" : "step";
      if (gone)
        snprintf(problem, sizeof(problem), "rank %lld (process %lld) is gone; rank %lld waited for it in %s, %s %lld", its, process, mine,
                 where, unit, step);
      else
        snprintf(problem, sizeof(problem),
                 "rank %lld (process %lld) did not come for %.0f s; rank %lld waits for it in %s, %s %lld; it was last seen in %s, %s %lld",
                 its, process, (double)s.timeout_ns / 1e9, mine, where, unit, step, name(other.stage.load()), unit,
                 (long long)other.step.load());
      give_up();
      throw Failure();
    }
  }

  [[noreturn]] void fail_with_others() {
    const int64_t seat = header->failed.load() - 1;
    if (!problem[0])
      snprintf(problem, sizeof(problem), "rank %lld stopped; rank %lld was waiting for it in %s, step %lld",
               (long long)seats[seat].rank, (long long)seats[s.seat].rank, name(seats[s.seat].stage.load()),
               (long long)seats[s.seat].step.load());
    throw Failure();
  }

  const Settings s;
  const std::vector<Bucket> buckets;
  std::vector<int64_t> ready_after;
  Header* header;
  Seat* seats;
  int64_t rounds = 0, sums_made = 0;
  char problem[512] = "";
  bool active = false;
  std::thread courier;
  std::atomic<bool> closing{false};
  std::atomic<uint32_t> begun{0}, ready{0}, done{0};
};

}  // namespace

EXPORT const int64_t tilework_exchange_layout[] = {2, sizeof(Header), sizeof(Seat), sizeof(Bucket), sizeof(Settings)};

EXPORT void* tilework_exchange_open(const Settings* settings) { return new Exchange(*settings); }
EXPORT void tilework_exchange_close(void* exchange) { delete static_cast<Exchange*>(exchange); }
EXPORT void tilework_exchange_begin(void* exchange) { static_cast<Exchange*>(exchange)->begin(); }
EXPORT void tilework_exchange_after(void* exchange, int64_t call) { static_cast<Exchange*>(exchange)->after_call(call); }
EXPORT int tilework_exchange_finish(void* exchange, char* error, size_t size) {
  return static_cast<Exchange*>(exchange)->finish(error, size);
}
EXPORT void tilework_exchange_give_up(void* exchange) { static_cast<Exchange*>(exchange)->give_up(); }
EXPORT int tilework_exchange_sum(void* exchange, void* data, int64_t count, int is_double, char* error, size_t size) {
  auto* own = static_cast<Exchange*>(exchange);
  return is_double ? own->sum_of_few(static_cast<double*>(data), count, error, size)
                   : own->sum_of_few(static_cast<float*>(data), count, error, size);
}
