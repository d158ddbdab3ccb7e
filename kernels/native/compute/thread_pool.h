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

#include "compute/cpu_count.h"
#include "compute/topology.h"
#include "compute/waitable.h"

namespace quire {

/// Threads that work on one function at a time; the caller of `run` is thread 0.
///
/// Nobody waits for a thread that the system does not let run: who has not come by the time that the caller is done is
/// left out. Inside `run` every thread, the caller too, flushes denormals. Between launches workers spin for a
/// while, at most 0.4 ms, in case the next launch comes soon, and then sleep. One thread at a time may call `run`.
class ThreadPool {
 public:
  using Task = void (*)(void* context, int thread);

  /// Starts places.size() - 1 workers, bound to the CPUs of their places if the system allows it. The caller of `run`
  /// is not: whatever it starts would inherit that, and it finds the CPU that workers leave free. Throws
  /// std::invalid_argument if the number of places is not in [1, kMaxThreads] or their nodes don't ascend from 0 by at
  /// most 1, std::runtime_error if a thread cannot be started.
  explicit ThreadPool(std::vector<Place> places);
  explicit ThreadPool(int threads, bool pin = false);  ///< in places that suit this host
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int size() const noexcept { return static_cast<int>(places_.size()); }
  bool pinned() const noexcept { return bound_ && places_[0].cpus.size() == 1; }  ///< a CPU for every thread
  int nodes() const noexcept { return places_.back().node + 1; }
  const Place& place(int thread) const noexcept { return places_[thread]; }

  /// Where the share of node `node` in `items` begins; it ends where that of the next begins. By threads.
  std::int64_t share_begin(int node, std::int64_t items) const { return items * first_thread_[node] / size(); }

  /// Calls task(context, 0) here, and task(context, thread) on every worker that comes before this has returned; it
  /// comes back when all those are done. The first exception of any of them is rethrown. Throws std::logic_error if
  /// the pool is running already.
  void run(Task task, void* context) {
    begin(task, context);
    finish();
  }

  /// The same in two parts, between which the caller does other things. Workers that have nothing else to do begin at
  /// once; nobody may call `run` before `finish` has returned, which throws std::logic_error if nothing has begun.
  void begin(Task task, void* context);
  void finish();

  template <class F>
    requires std::invocable<F&, int>
  void run(F&& function) {
    using Function = std::remove_reference_t<F>;
    void* context = const_cast<void*>(static_cast<const void*>(std::addressof(function)));
    run([](void* f, int thread) { (*static_cast<Function*>(f))(thread); }, context);
  }

  /// Inside `run`, or before `finish`: waits until `value` is no longer `seen`, which another thread is about to bring
  /// about. Spins first.
  void wait_while(Waitable& value, std::uint32_t seen) const noexcept {
    for (int pauses = 0; pauses < patience_; ++pauses) {
      if (value.load() != seen) return;
      pause_cpu();
    }
    value.sleep_while(seen);
  }

  /// Asks the kernel, once per process, to let it use AMX tiles; false where CPU or kernel lack them.
  static bool request_amx() noexcept;

 private:
  struct Slot {
    Waitable finished;                      ///< the last launch that its worker is done with
    std::atomic<std::uint32_t> entered{0};  ///< the last launch that its worker has entered, or was left out of
  };

  void work(int thread);
  std::uint32_t await_launch(std::uint32_t seen, std::chrono::steady_clock::duration& spin);
  bool avoid_caller() const;
  void execute(int thread) noexcept;
  void end_launch() noexcept;
  void stop() noexcept;

  std::vector<Place> places_;      ///< by thread
  bool bound_ = true;              ///< workers, as their places say
  std::vector<int> first_thread_;  ///< by node, and then the number of threads
  const bool oversubscribed_;      ///< fewer CPUs than threads: whoever waits must make room
  const int patience_;             ///< pauses before sleep
  std::unique_ptr<Slot[]> slots_;
  std::vector<std::thread> workers_;

  // Written by the caller while no worker is inside; the increment of launch_ publishes them.
  Task task_ = nullptr;
  void* context_ = nullptr;
  std::exception_ptr error_;

  Waitable launch_;
  std::atomic<int> caller_cpu_{-1};  ///< where the caller was seen last
  std::atomic<bool> failed_{false};
  std::atomic<bool> running_{false};
  std::atomic<bool> stopping_{false};
};

}  // namespace quire
