#pragma once

#include <pthread.h>

#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

struct LlgCancellationHandle;  // llguidance's own

namespace quire {

/// Cancels calls of llguidance that compute for too long, from a thread of its own.
///
/// llguidance reads a text that a grammar forces to its end at once, however long it is, and takes no limit for that.
/// What counts is the CPU time of the calling thread, so that a busy machine makes no call fail. The watching thread
/// samples it, since a call that took the time itself would spend more on that than on the grammar.
class CallLimits {
 public:
  using Cancel = void (*)(LlgCancellationHandle*);

  explicit CallLimits(Cancel cancel) : cancel_(cancel) {}
  CallLimits(const CallLimits&) = delete;
  CallLimits& operator=(const CallLimits&) = delete;
  ~CallLimits();

  /// Starts the thread, if it has not been started. Throws std::system_error if it cannot.
  void start();

  /// Begins a call of this thread that `handle` cancels.
  void begin(LlgCancellationHandle* handle);

  /// Cancels the call of this thread.
  void cancel() noexcept;

  /// Ends the call of this thread, if there is one: from now on it is not cancelled.
  void end() noexcept;

 private:
  struct Call {
    pthread_t thread;
    LlgCancellationHandle* handle;
    double begun;  ///< CPU seconds of the thread when the watch first saw the call, negative before
  };

  void watch();
  void check(Call& call) const;

  Cancel cancel_;
  std::mutex mutex_;  ///< guards what follows
  std::condition_variable wake_;
  std::vector<Call> calls_;
  bool is_used_ = false;    ///< a call has begun since the watch looked last
  bool is_asleep_ = false;  ///< the watch waits for a call
  bool is_stopping_ = false;
  std::thread watch_;
};

}  // namespace quire
