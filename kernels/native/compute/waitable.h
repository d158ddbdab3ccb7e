#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <climits>
#include <cstdint>
#include <ctime>

namespace quire {

/// A pause of some 25 ns that leaves the core's other hardware thread alone.
inline void pause_cpu() noexcept {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

/// A number on a cache line of its own whose changes threads can sleep for.
///
/// Unlike std::atomic's `wait` it never yields first: a thread that yields goes to the end of the run queue, which
/// costs a time slice where other processes want the CPU too; a thread that sleeps and is woken goes to the front.
class alignas(64) Waitable {
 public:
  std::uint32_t load() const noexcept { return value_.load(std::memory_order_acquire); }

  /// Sets the value while no thread waits.
  void reset(std::uint32_t value) noexcept { value_.store(value, std::memory_order_relaxed); }

  /// Sets the value and wakes the threads that sleep.
  void store(std::uint32_t value) noexcept {
    value_.store(value);  // sequentially consistent: must precede the check for sleepers
    if (sleepers_.load() > 0) wake_all();
  }

  /// Returns when the value is not `seen`.
  void sleep_while(std::uint32_t seen) noexcept {
    sleepers_.fetch_add(1);
    while (value_.load() == seen) sleep(seen);
    sleepers_.fetch_sub(1);
  }

  /// Returns when the value is not `seen`, after `longest`, or spuriously before.
  void sleep_while(std::uint32_t seen, std::chrono::nanoseconds longest) noexcept {
    sleepers_.fetch_add(1);
    if (value_.load() == seen) sleep(seen, longest);
    sleepers_.fetch_sub(1);
  }

 private:
  void sleep(std::uint32_t seen, std::chrono::nanoseconds longest) noexcept {
    const auto seconds = std::chrono::floor<std::chrono::seconds>(longest);
    const timespec timeout{seconds.count(), (longest - seconds).count()};
    syscall(SYS_futex, &value_, FUTEX_WAIT_PRIVATE, seen, &timeout);
  }
  void sleep(std::uint32_t seen) noexcept { syscall(SYS_futex, &value_, FUTEX_WAIT_PRIVATE, seen, nullptr); }
  void wake_all() noexcept { syscall(SYS_futex, &value_, FUTEX_WAKE_PRIVATE, INT_MAX); }

  std::atomic<std::uint32_t> value_{0};
  std::atomic<std::uint32_t> sleepers_{0};
};

}  // namespace quire
