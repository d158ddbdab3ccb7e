#pragma once

#include <atomic>
#include <concepts>
#include <cstdint>
#include <exception>
#include <memory>
#include <thread>
#include <type_traits>
#include <vector>

#include "cpu_count.h"

namespace quire {

/// Threads that run one function at a time, all together; the caller of `run` is thread 0.
///
/// Inside `run` every thread, the caller too, flushes denormals. Between launches workers spin for some microseconds,
/// in case the next launch comes at once, and then sleep. One thread at a time may call `run`.
class ThreadPool {
 public:
  using Task = void (*)(void* context, int thread);

  /// Starts threads - 1 workers. With `pin`, and if there are CPUs enough, every thread has a CPU of its own: workers
  /// always, the caller while it is inside `run`, for whatever it starts later would inherit its affinity.
  /// Throws std::invalid_argument if `threads` is not in [1, kMaxThreads], std::runtime_error if one cannot be started.
  explicit ThreadPool(int threads, bool pin = false);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int size() const noexcept { return size_; }
  bool pinned() const noexcept { return caller_cpu_ >= 0; }

  /// Calls task(context, thread) for every thread in [0, size) and returns when all are done. The first exception of
  /// any of them is rethrown here. Throws std::logic_error if the pool is running already.
  void run(Task task, void* context);

  template <class F>
    requires std::invocable<F&, int>
  void run(F&& function) {
    using Function = std::remove_reference_t<F>;
    void* context = const_cast<void*>(static_cast<const void*>(std::addressof(function)));
    run([](void* f, int thread) { (*static_cast<Function*>(f))(thread); }, context);
  }

  /// Waits until every thread has come here; what any wrote before it, all see after it. Only inside `run`, by all
  /// threads, with the thread's own number. If a thread has left `run` by an exception, the others leave by one here.
  void barrier(int thread);

  /// Asks the kernel, once per process, to let it use AMX tiles; false where CPU or kernel lack them.
  static bool request_amx() noexcept;

 private:
  // One cache line each, or threads would slow each other down.
  struct alignas(64) Slot {
    std::atomic<std::uint32_t> arrived{0};   ///< barriers that this thread has come to
    std::atomic<std::uint32_t> finished{0};  ///< the last launch that this thread is done with
  };

  void work(int thread);
  void await_launch(std::uint32_t seen, int& spin_us) const;
  void execute(int thread) noexcept;
  void stop() noexcept;
  void pin_workers() noexcept;
  template <class Done>
  void spin_until(Done done) const;

  const int size_;
  const bool oversubscribed_;  ///< fewer CPUs than threads: whoever waits must make room
  int caller_cpu_ = -1;        ///< where thread 0 runs if the pool is pinned, else -1
  std::unique_ptr<Slot[]> slots_;
  std::vector<std::thread> workers_;

  // Written by the caller while all workers wait; the increment of launch_ publishes them.
  Task task_ = nullptr;
  void* context_ = nullptr;
  bool stopping_ = false;
  std::exception_ptr error_;

  alignas(64) std::atomic<std::uint32_t> launch_{0};
  alignas(64) std::atomic<std::uint32_t> released_{0};  ///< barriers that all threads have come to
  alignas(64) std::atomic<bool> failed_{false};
  std::atomic<bool> running_{false};
};

}  // namespace quire
