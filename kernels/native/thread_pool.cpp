#include "thread_pool.h"

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <string>
#include <system_error>

#include "denormals.h"

#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace quire {
namespace {

using Clock = std::chrono::steady_clock;

// A worker's patience doubles when a launch comes while it spins and halves when none does.
constexpr int kLeastSpinUs = 10;
constexpr int kMostSpinUs = 100;
constexpr int kPausesPerLook = 32;  // at the clock

constexpr int kPatience = 2048;  // pauses; then yield, for the one that is waited for may need this CPU

struct BarrierAbandoned {};

#if defined(__linux__)
std::vector<cpu_set_t> mask_of(int cpu) {
  std::vector<cpu_set_t> mask(cpu / CPU_SETSIZE + 1);
  CPU_SET_S(cpu, mask.size() * sizeof(cpu_set_t), mask.data());
  return mask;
}
#endif

/// Keeps the calling thread on one CPU while it lives; on none in particular if `cpu` is negative.
class StayOn {
 public:
  explicit StayOn(int cpu) {
#if defined(__linux__)
    if (cpu < 0 || sched_getaffinity(0, sizeof saved_, &saved_) != 0) return;
    const std::vector<cpu_set_t> mask = mask_of(cpu);
    moved_ = sched_setaffinity(0, mask.size() * sizeof(cpu_set_t), mask.data()) == 0;
#endif
  }
  ~StayOn() {
#if defined(__linux__)
    if (moved_) sched_setaffinity(0, sizeof saved_, &saved_);
#endif
  }
  StayOn(const StayOn&) = delete;
  StayOn& operator=(const StayOn&) = delete;

 private:
#if defined(__linux__)
  cpu_set_t saved_;  // hosts with more CPUs than it holds refuse the call, and the thread stays as it is
#endif
  bool moved_ = false;
};

inline void pause_cpu() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

int checked(int threads) {
  if (threads < 1 || threads > kMaxThreads) {
    throw std::invalid_argument("threads=" + std::to_string(threads) + " is out of range; give 1 to " +
                                std::to_string(kMaxThreads));
  }
  return threads;
}

}  // namespace

ThreadPool::ThreadPool(int threads, bool pin)
    : size_(checked(threads)), oversubscribed_(threads > available_cpus()), slots_(std::make_unique<Slot[]>(threads)) {
  workers_.reserve(threads - 1);
  try {
    for (int thread = 1; thread < threads; ++thread) workers_.emplace_back([this, thread] { work(thread); });
  } catch (const std::system_error& error) {
    stop();
    throw std::runtime_error("cannot start thread " + std::to_string(workers_.size() + 2) + " of " +
                             std::to_string(threads) + ": " + error.what());
  }
  if (pin) pin_workers();
}

ThreadPool::~ThreadPool() { stop(); }

void ThreadPool::stop() noexcept {
  stopping_ = true;
  launch_.fetch_add(1);
  launch_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

/// A hint to the scheduler: where it is refused, threads run unpinned and `pinned` says so.
void ThreadPool::pin_workers() noexcept {
#if defined(__linux__)
  const std::vector<int> cpus = affinity_cpus();
  if (cpus.size() < static_cast<std::size_t>(size_)) return;
  bool granted = true;
  for (int thread = 1; thread < size_; ++thread) {
    const std::vector<cpu_set_t> mask = mask_of(cpus[thread]);
    const pthread_t worker = workers_[thread - 1].native_handle();
    granted &= pthread_setaffinity_np(worker, mask.size() * sizeof(cpu_set_t), mask.data()) == 0;
  }
  if (granted) caller_cpu_ = cpus[0];
#endif
}

void ThreadPool::run(Task task, void* context) {
  if (running_.exchange(true, std::memory_order_acquire)) {
    throw std::logic_error("ThreadPool::run was called while the pool is running; one launch at a time");
  }
  task_ = task;
  context_ = context;
  const std::uint32_t launch = launch_.fetch_add(1) + 1;  // sequentially consistent: must precede the look for sleepers
  if (size_ > 1) launch_.notify_all();
  {
    const FlushDenormals flush;
    const StayOn stay(caller_cpu_);
    execute(0);
    for (int thread = 1; thread < size_; ++thread) {
      spin_until([&] { return slots_[thread].finished.load(std::memory_order_acquire) == launch; });
    }
  }
  std::exception_ptr error;
  if (failed_.load(std::memory_order_relaxed)) {
    std::swap(error, error_);
    failed_.store(false, std::memory_order_relaxed);
    // Threads left at different barriers; the next launch counts from zero again.
    released_.store(0, std::memory_order_relaxed);
    for (int thread = 0; thread < size_; ++thread) slots_[thread].arrived.store(0, std::memory_order_relaxed);
  }
  running_.store(false, std::memory_order_release);
  if (error) std::rethrow_exception(error);
}

void ThreadPool::execute(int thread) noexcept {
  try {
    task_(context_, thread);
  } catch (const BarrierAbandoned&) {  // another thread failed first and has left its exception
  } catch (...) {
    // error_ belongs to the thread that sets failed_; the caller reads it when all have finished.
    if (!failed_.exchange(true)) error_ = std::current_exception();
  }
}

void ThreadPool::work(int thread) {
  const FlushDenormals flush;
  int spin_us = kMostSpinUs;
  for (std::uint32_t seen = 0;; ++seen) {
    await_launch(seen, spin_us);
    if (stopping_) return;
    execute(thread);
    slots_[thread].finished.store(seen + 1, std::memory_order_release);
  }
}

void ThreadPool::await_launch(std::uint32_t seen, int& spin_us) const {
  if (!oversubscribed_) {
    const auto deadline = Clock::now() + std::chrono::microseconds(spin_us);
    do {
      for (int i = 0; i < kPausesPerLook; ++i) {
        if (launch_.load(std::memory_order_acquire) != seen) {
          spin_us = std::min(2 * spin_us, kMostSpinUs);
          return;
        }
        pause_cpu();
      }
      std::this_thread::yield();  // idle as it is, it must not keep the caller from this CPU
    } while (Clock::now() < deadline);
    spin_us = std::max(spin_us / 2, kLeastSpinUs);
  }
  launch_.wait(seen, std::memory_order_acquire);
}

template <class Done>
void ThreadPool::spin_until(Done done) const {
  const int patience = oversubscribed_ ? 16 : kPatience;
  for (int pauses = 0; !done(); ++pauses) {
    if (pauses < patience) {
      pause_cpu();
    } else {
      std::this_thread::yield();
    }
  }
}

void ThreadPool::barrier(int thread) {
  const auto wait_for = [this](const std::atomic<std::uint32_t>& counter, std::uint32_t round) {
    spin_until(
        [&] { return counter.load(std::memory_order_acquire) == round || failed_.load(std::memory_order_relaxed); });
    if (failed_.load(std::memory_order_relaxed)) throw BarrierAbandoned();
  };
  // Thread 0 gathers the others and releases them: a plain store and load each, where a shared counter would make all
  // threads queue for one cache line.
  std::atomic<std::uint32_t>& arrived = slots_[thread].arrived;
  const std::uint32_t round = arrived.load(std::memory_order_relaxed) + 1;
  arrived.store(round, std::memory_order_release);
  if (thread != 0) return wait_for(released_, round);
  for (int other = 1; other < size_; ++other) wait_for(slots_[other].arrived, round);
  released_.store(round, std::memory_order_release);
}

bool ThreadPool::request_amx() noexcept {
#if defined(__linux__) && defined(__x86_64__)
  constexpr long kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
  constexpr long kTileData = 18;               // XFEATURE_XTILEDATA
  static const bool granted = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return granted;
#else
  return false;
#endif
}

}  // namespace quire
