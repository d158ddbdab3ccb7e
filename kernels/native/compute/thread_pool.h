#pragma once

#include <atomic>
#include <chrono>
#include <concepts>
#include <cstdint>
#include <exception>
#include <memory>
#include <thread>
#include <type_traits>
#include <vector>

#include "compute/topology.h"
#include "compute/waitable.h"

namespace quire {

/// Threads that run one function at a time together; the caller of `run` is thread 0.
///
/// The pool does not wait for descheduled threads: a worker that has not arrived when the caller is done misses the
/// launch. Inside `run` every thread, including the caller, flushes denormals. Between launches workers spin for at
/// most 0.4 ms, in case the next launch comes soon, and then sleep. Only one thread at a time may call `run`.
class ThreadPool {
 public:
  using Task = void (*)(void* context, int thread);

  /// Starts places.size() - 1 workers, bound to the CPUs of their places if the system allows it. The caller of `run`
  /// is not bound: threads that it starts would inherit the affinity, and the scheduler puts it on the CPU that the
  /// workers leave free. Throws std::invalid_argument if the number of places is not in [1, kMaxThreads] or their nodes
  /// do not ascend from 0 in steps of at most 1, std::runtime_error if a thread cannot be started.
  explicit ThreadPool(std::vector<Place> places);
  explicit ThreadPool(int threads, bool pin = false);  ///< places its threads on the cores of this host
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int size() const noexcept { return static_cast<int>(places_.size()); }
  bool pinned() const noexcept { return bound_ && places_[0].cpus.size() == 1; }  ///< every thread has a CPU of its own
  int nodes() const noexcept { return places_.back().node + 1; }
  const Place& place(int thread) const noexcept { return places_[thread]; }

  /// Returns the first of the node's share of `items`, in proportion to its threads; the next node's share follows.
  std::int64_t share_begin(int node, std::int64_t items) const { return items * first_thread_[node] / size(); }

  /// Calls task(context, 0) on this thread and task(context, thread) on every worker that arrives before it returns,
  /// waits for all of them, and rethrows the first exception. Throws std::logic_error if the pool is already running.
  void run(Task task, void* context) {
    begin(task, context);
    finish();
  }

  /// Split `run` in two, so that the caller can do other work in between; idle workers start at `begin`. No other
  /// launch may begin before `finish` has returned. `finish` throws std::logic_error if nothing has begun.
  void begin(Task task, void* context);
  void finish();

  template <class F>
    requires std::invocable<F&, int>
  void run(F&& function) {
    using Function = std::remove_reference_t<F>;
    void* context = const_cast<void*>(static_cast<const void*>(std::addressof(function)));
    run([](void* f, int thread) { (*static_cast<Function*>(f))(thread); }, context);
  }

  /// Waits until `value` is no longer `seen`: spins first, then sleeps. For use inside `run`, or before `finish`, where
  /// another thread is about to change the value.
  void wait_while(Waitable& value, std::uint32_t seen) const noexcept {
    for (int pauses = 0; pauses < max_spins_; ++pauses) {
      if (value.load() != seen) return;
      pause_cpu();
    }
    value.sleep_while(seen);
  }

  /// Asks the kernel, once per process, for permission to use AMX tiles; false if the CPU or the kernel lacks them.
  static bool request_amx() noexcept;

 private:
  struct Slot {
    Waitable finished;                      ///< the last launch that the worker has finished
    std::atomic<std::uint32_t> entered{0};  ///< the last launch that the worker has entered or missed
  };

  void work(int thread);
  std::uint32_t await_launch(std::uint32_t seen, std::chrono::steady_clock::duration& spin);
  bool avoid_caller() const;
  void execute(int thread) noexcept;
  void end_launch() noexcept;
  void stop() noexcept;

  std::vector<Place> places_;      ///< place of each thread
  bool bound_ = true;              ///< the workers are bound to their places
  std::vector<int> first_thread_;  ///< first thread of each node, and then the number of threads
  const bool oversubscribed_;      ///< there are fewer CPUs than threads: a waiting thread must yield its CPU
  const int max_spins_;            ///< pauses before a waiting thread sleeps
  std::unique_ptr<Slot[]> slots_;
  std::vector<std::thread> workers_;

  // Written by the caller while no worker is inside; the increment of launch_ publishes them.
  Task task_ = nullptr;
  void* context_ = nullptr;
  std::exception_ptr error_;

  Waitable launch_;
  std::atomic<int> caller_cpu_{-1};  ///< CPU on which the caller ran last
  std::atomic<bool> failed_{false};
  std::atomic<bool> running_{false};
  std::atomic<bool> stopping_{false};
};

}  // namespace quire
