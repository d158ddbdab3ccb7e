#include "grammar/call_limits.h"

#include <algorithm>
#include <chrono>
#include <ctime>

namespace quire {
namespace {

constexpr double kMostSeconds = 0.05;  // limit of CPU time; endless calls take that long, a usual one some microseconds
constexpr std::chrono::milliseconds kInterval{10};
constexpr int kMaxIdle = 100;  // intervals without a call, after which the watch sleeps until there is one

double cpu_seconds(pthread_t thread) {
  clockid_t clock;
  timespec time;
  if (pthread_getcpuclockid(thread, &clock) != 0 || clock_gettime(clock, &time) != 0) return 0;
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

}  // namespace

CallLimits::~CallLimits() {
  {
    const std::lock_guard lock(mutex_);
    is_stopping_ = true;
  }
  wake_.notify_one();
  if (watch_.joinable()) watch_.join();
}

void CallLimits::start() {
  const std::lock_guard lock(mutex_);
  if (!watch_.joinable()) watch_ = std::thread([this] { watch(); });
}

void CallLimits::begin(LlgCancellationHandle* handle) {
  const std::lock_guard lock(mutex_);
  calls_.push_back({pthread_self(), handle, -1});
  is_used_ = true;
  if (is_asleep_) wake_.notify_one();
}

void CallLimits::cancel() noexcept {
  const std::lock_guard lock(mutex_);
  for (const Call& call : calls_)
    if (pthread_equal(call.thread, pthread_self()) != 0) cancel_(call.handle);
}

void CallLimits::end() noexcept {
  const std::lock_guard lock(mutex_);
  std::erase_if(calls_, [](const Call& call) { return pthread_equal(call.thread, pthread_self()) != 0; });
}

void CallLimits::watch() {
  std::unique_lock lock(mutex_);
  for (int num_idle = 0; !is_stopping_; num_idle = is_used_ || !calls_.empty() ? 0 : num_idle + 1) {
    is_used_ = false;
    if (num_idle < kMaxIdle) {
      wake_.wait_for(lock, kInterval, [&] { return is_stopping_; });
    } else {
      is_asleep_ = true;
      wake_.wait(lock, [&] { return is_stopping_ || is_used_; });
      is_asleep_ = false;
    }
    for (Call& call : calls_) check(call);
  }
}

void CallLimits::check(Call& call) const {
  const double seconds = cpu_seconds(call.thread);
  if (call.begun < 0)
    call.begun = seconds;
  else if (seconds - call.begun > kMostSeconds)
    cancel_(call.handle);
}

}  // namespace quire
