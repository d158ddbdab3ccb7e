#include "compute/thread_pool.h"

#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <numeric>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>

#include "compute/denormals.h"

namespace quire {
namespace {

using Clock = std::chrono::steady_clock;

// A worker spins for twice as long as it has recently waited for a launch. The longest waits are those between two
// steps, 150 to 200 us with a small model; sleeping and waking would prolong them.
constexpr Clock::duration kMinSpin = std::chrono::microseconds(10);
constexpr Clock::duration kMaxSpin = std::chrono::microseconds(400);
constexpr int kPausesPerClockRead = 32;

// Pauses before a thread sleeps: about 200 us, longer than most chunks take, since sleeping and waking costs 10 us.
constexpr int kMaxSpins = 8192;
constexpr int kMaxSpinsOversubscribed = 16;

Clock::duration next_spin(Clock::duration spin, Clock::duration waited) {
  if (waited > kMaxSpin) return std::max(spin / 2, kMinSpin);
  return std::clamp(std::max(spin * 7 / 8, 2 * waited), kMinSpin, kMaxSpin);
}

/// Moves the calling thread to another CPU; returns false if there is none.
bool leave_cpu(int cpu) {
  std::vector<int> others = affinity_cpus();
  std::erase(others, cpu);
  const ScopedAffinity moved(others);
  return !others.empty();
}

std::vector<Place> checked(std::vector<Place> places) {
  if (places.empty() || places.size() > kMaxThreads)
    throw std::invalid_argument("places of " + std::to_string(places.size()) + " threads; give 1 to " +
                                std::to_string(kMaxThreads));
  int last = 0;
  for (const Place& place : places) {
    if (place.node < last || place.node > last + (&place != &places.front()))
      throw std::invalid_argument("the nodes of threads must be 0, 1, ... in ascending order");
    last = place.node;
  }
  return places;
}

std::vector<int> first_threads(const std::vector<Place>& places) {
  std::vector<int> first(static_cast<std::size_t>(places.back().node) + 2, 0);
  for (const Place& place : places) ++first[place.node + 1];
  std::partial_sum(first.begin(), first.end(), first.begin());
  return first;
}

}  // namespace

ThreadPool::ThreadPool(int threads, bool pin)
    : ThreadPool(place_threads(threads, pin, physical_cores(affinity_cpus()))) {}

ThreadPool::ThreadPool(std::vector<Place> places)
    : places_(checked(std::move(places))),
      first_thread_(first_threads(places_)),
      oversubscribed_(size() > available_cpus()),
      max_spins_(oversubscribed_ ? kMaxSpinsOversubscribed : kMaxSpins),
      slots_(std::make_unique<Slot[]>(places_.size())) {
  workers_.reserve(places_.size() - 1);
  try {
    for (int thread = 1; thread < size(); ++thread) workers_.emplace_back([this, thread] { work(thread); });
  } catch (const std::system_error& error) {
    stop();
    throw std::runtime_error("cannot start thread " + std::to_string(workers_.size() + 2) + " of " +
                             std::to_string(size()) + ": " + error.what());
  }
  for (int thread = 1; thread < size(); ++thread)
    bound_ &= set_affinity(workers_[thread - 1].native_handle(), places_[thread].cpus);
}

ThreadPool::~ThreadPool() { stop(); }

void ThreadPool::stop() noexcept {
  stopping_.store(true);
  launch_.store(launch_.load() + 1);
  for (std::thread& worker : workers_) worker.join();
}

void ThreadPool::begin(Task task, void* context) {
  if (running_.exchange(true, std::memory_order_acquire)) {
    throw std::logic_error("ThreadPool::run was called while the pool is running; one launch at a time");
  }
  task_ = task;
  context_ = context;
  caller_cpu_.store(sched_getcpu(), std::memory_order_relaxed);
  launch_.store(launch_.load() + 1);
}

void ThreadPool::finish() {
  if (!running_.load(std::memory_order_relaxed)) throw std::logic_error("ThreadPool::finish was called before begin");
  {
    const FlushDenormals flush;
    execute(0);
    end_launch();
  }
  std::exception_ptr error;
  if (failed_.load(std::memory_order_relaxed)) {
    std::swap(error, error_);
    failed_.store(false, std::memory_order_relaxed);
  }
  running_.store(false, std::memory_order_release);
  if (error) std::rethrow_exception(error);
}

/// Excludes workers that have not entered, and waits for those that have.
void ThreadPool::end_launch() noexcept {
  const std::uint32_t launch = launch_.load();
  for (int thread = 1; thread < size(); ++thread) {
    Slot& slot = slots_[thread];
    std::uint32_t entered = slot.entered.load(std::memory_order_relaxed);
    if (entered != launch && slot.entered.compare_exchange_strong(entered, launch, std::memory_order_relaxed)) continue;
    for (std::uint32_t last; (last = slot.finished.load()) != launch;) wait_while(slot.finished, last);
  }
}

void ThreadPool::execute(int thread) noexcept {
  try {
    task_(context_, thread);
  } catch (...) {
    // Only the thread that sets failed_ writes error_; the caller reads it when all threads have finished.
    if (!failed_.exchange(true)) error_ = std::current_exception();
  }
}

void ThreadPool::work(int thread) {
  const FlushDenormals flush;
  Slot& slot = slots_[thread];
  Clock::duration spin = kMaxSpin;
  for (std::uint32_t seen = 0;;) {
    const std::uint32_t launch = await_launch(seen, spin);
    if (stopping_.load()) return;
    // Fails and loads the current launch if the caller has ended one since; otherwise the worker is in `launch`.
    if (!slot.entered.compare_exchange_strong(seen, launch, std::memory_order_acquire)) continue;
    execute(thread);
    slot.finished.store(launch);
    seen = launch;
  }
}

/// Moves the calling worker off the caller's CPU, where the system tends to wake it and the two would take turns.
/// Returns false if there is no other CPU.
bool ThreadPool::avoid_caller() const {
  const int cpu = sched_getcpu();
  return cpu < 0 || cpu != caller_cpu_.load(std::memory_order_relaxed) || leave_cpu(cpu);
}

/// Waits for a launch after `seen`, and returns it.
std::uint32_t ThreadPool::await_launch(std::uint32_t seen, Clock::duration& spin) {
  const auto begun = Clock::now();
  if (!oversubscribed_) {
    do {
      for (int i = 0; i < kPausesPerClockRead; ++i) {
        if (const std::uint32_t launch = launch_.load(); launch != seen) {
          spin = next_spin(spin, Clock::now() - begun);
          return launch;
        }
        pause_cpu();
      }
      if (!avoid_caller()) break;
    } while (Clock::now() - begun < spin);
  }
  launch_.sleep_while(seen);
  if (!oversubscribed_) avoid_caller();
  spin = next_spin(spin, Clock::now() - begun);
  return launch_.load();
}

bool ThreadPool::request_amx() noexcept {
#if defined(__x86_64__)
  constexpr long kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
  constexpr long kTileData = 18;               // XFEATURE_XTILEDATA
  static const bool granted = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return granted;
#else
  return false;
#endif
}

}  // namespace quire
