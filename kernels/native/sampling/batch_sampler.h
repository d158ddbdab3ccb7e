#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <span>
#include <string>
#include <vector>

#include "compute/abi.h"
#include "compute/device.h"
#include "compute/thread_pool.h"
#include "compute/waitable.h"
#include "grammar/token_constraint.h"
#include "kv_cache/sequences.h"
#include "sampling/sampler.h"

namespace quire {

class DeviceSampler;

/// Rows of logits of one sequence: one for the token after its last one, and one more for each draft. Or a single row,
/// for the log probability of a prompt token.
struct SamplingTask {
  std::int32_t index;  ///< index of the sequence in the batch
  std::int32_t slot;
  Sequence* sequence;      ///< its last `num_rows - 1` tokens are drafts
  std::int32_t first_row;  ///< first row among the step's tokens; the others follow it
  std::int32_t num_rows;
  std::int64_t position;  ///< position of the token that the first row predicts
  bool samples;           ///< false: report the prompt token that stands at `position`
  TokenConstraint* constraint = nullptr;
  std::span<float> logits = {};              ///< logits of the first row, in the device's memory
  const TokenMask* mask = nullptr;           ///< what the constraint allows next, if a device is to know it
  std::span<const SampleRow> asked = {};     ///< what a device was to sample of the rows; none if it never samples
  std::span<const SampledRow> sampled = {};  ///< what it has sampled of them
  std::int32_t num_given = 0;  ///< number of drafts that are taken as if they were sampled: benchmarks only
};

/// The outcome of a task.
struct SampledSpan {
  std::vector<std::int32_t> token_ids{};  ///< empty without an `error`: the constraint was late
  std::vector<TokenLogprobs> logprobs{};  ///< log probabilities of each token, or none
  std::string error{};
  std::exception_ptr failure{};  ///< of the device: it is lost, or has too little memory
  Waitable is_done{};            ///< 1 once the outcome is complete
};

/// Makes the sampling state of a task's sequence forget the tokens of its outcome, and truncates the sequence to the
/// sampled position: its drafts are gone.
void take_back(const SamplingTask& task, const SampledSpan& span);

/// Samples tokens for the sequences of a step, with all threads, a task at a time. The caller takes the outcomes in
/// order, and may do other work in between. While an outcome is left to be taken, the threads cannot be used for
/// anything else.
///
/// Each row of a task is sampled exactly as it would be in a step of its own, and only as long as the tokens so far
/// equal the drafts. The sampling state and the constraint follow the tokens of the span; the sequence's tokens do not
/// change. After a sampled token come the tokens that the constraint forces, unless log probabilities are asked for.
/// The span ends with the first token that is not the draft in its place; so all tokens before its last one are
/// computed, as far as there were rows. Where a later row of a task fails, or its constraint is late, the span ends
/// before it.
class BatchSampler {
 public:
  using Clock = TokenConstraint::Clock;

  /// With the threads of `device`; `device_sampler`, if the device samples, has been asked about all tasks. Both must
  /// outlive the sampler.
  explicit BatchSampler(const Device& device, DeviceSampler* device_sampler = nullptr);
  ~BatchSampler();
  BatchSampler(const BatchSampler&) = delete;
  BatchSampler& operator=(const BatchSampler&) = delete;

  /// Begins with `tasks`, which must outlive the last `take`; logits of one row lie `stride` floats after those of the
  /// row before. Constraints are waited for until `soon`, or longer, until one is ready, if no other task samples
  /// (`has_others`).
  void begin(std::span<const SamplingTask> tasks, std::int64_t stride, Clock::time_point soon, bool has_others);

  bool has_left() const { return is_running_; }                            ///< true if outcomes are left to be taken
  const SamplingTask& next_task() const { return tasks_[num_taken_]; }     ///< task whose outcome is taken next
  bool is_next_done() const { return spans_[num_taken_].is_done.load(); }  ///< true if `take` would not wait

  /// Returns the outcome of `next_task`. While another thread works on it, the caller works on those of the first `end`
  /// tasks that no thread has begun, unless their constraint is late.
  SampledSpan& take(std::size_t end);

  /// Begins no other task, waits for those that have begun, and takes back the outcomes that have not been taken.
  void cancel();

 private:
  void stop();
  bool run_next(int thread);
  bool is_worth_running(std::size_t end) const;
  Clock::time_point deadline() const { return has_others_.load() ? soon_ : late_; }
  bool await(TokenConstraint& constraint);
  void run(const SamplingTask& task, SamplerScratch& scratch, SampledSpan& span);
  void sample_span(const SamplingTask& task, SamplerScratch& scratch, SampledSpan& span);
  SampleResult sample_row(const SamplingTask& task, std::size_t row, SamplerScratch& scratch) const;
  TokenLogprobs report(const SamplingTask& task, SamplerScratch& scratch) const;
  std::span<float> logits_of(const SamplingTask& task, std::size_t row, SamplerScratch& scratch) const;

  const Device& device_;
  DeviceSampler* device_sampler_;  ///< nullptr: the host samples
  ThreadPool& threads_;
  std::vector<SamplerScratch> scratch_;  ///< one per thread
  std::span<const SamplingTask> tasks_;
  std::int64_t stride_ = 0;
  std::vector<SampledSpan> spans_;
  std::atomic<std::size_t> next_{0};  ///< first task that no thread has begun
  std::size_t num_taken_ = 0;
  Clock::time_point soon_, late_;        ///< deadlines of constraints
  std::atomic<bool> has_others_{false};  ///< true if another task samples, or has sampled
  bool is_running_ = false;
  bool is_alone_ = false;  ///< no thread but the caller samples
};

}  // namespace quire
