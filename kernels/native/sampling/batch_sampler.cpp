#include "sampling/batch_sampler.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <optional>
#include <utility>

#include "compute/arena.h"
#include "compute/cuda_driver.h"
#include "sampling/device_sampler.h"

namespace quire {
namespace {

constexpr std::chrono::milliseconds kLongestWait{100};  // longest wait if every task waits for a late constraint
constexpr std::chrono::milliseconds kPoll{1};           // interval of checks whether another task has sampled

}  // namespace

void take_back(const SamplingTask& task, const SampledSpan& span) {
  for (const std::int32_t token : span.token_ids) task.sequence->sampling.remove(token);
  task.sequence->tokens.resize(static_cast<std::size_t>(task.position));
}

BatchSampler::BatchSampler(const Device& device, DeviceSampler* device_sampler)
    : device_(device),
      device_sampler_(device_sampler),
      threads_(device.threads()),
      scratch_(static_cast<std::size_t>(threads_.size())) {}

BatchSampler::~BatchSampler() { stop(); }

void BatchSampler::begin(std::span<const SamplingTask> tasks, std::int64_t stride, Clock::time_point soon,
                         bool has_others) {
  tasks_ = tasks;
  stride_ = stride;
  spans_ = std::vector<SampledSpan>(tasks.size());
  next_ = 0;
  num_taken_ = 0;
  soon_ = soon;
  late_ = Clock::now() + kLongestWait;
  has_others_ = has_others;
  is_running_ = !tasks.empty();
  is_alone_ = tasks.size() <= 1 && has_others;  // the caller has it sooner than another thread would come
  if (is_alone_ || !is_running_) return;
  threads_.begin(
      [](void* sampler, int thread) {
        while (static_cast<BatchSampler*>(sampler)->run_next(thread)) {
        }
      },
      this);
}

SampledSpan& BatchSampler::take(std::size_t end) {
  SampledSpan& span = spans_[num_taken_];
  while (span.is_done.load() == 0)
    if (!is_worth_running(end) || !run_next(0)) threads_.wait_while(span.is_done, 0);
  if (++num_taken_ == tasks_.size()) stop();
  return span;
}

void BatchSampler::cancel() {
  if (!is_running_) return;
  stop();
  for (std::size_t i = num_taken_; i < tasks_.size(); i++)
    if (tasks_[i].samples) take_back(tasks_[i], spans_[i]);
}

void BatchSampler::stop() {
  if (!is_running_) return;
  is_running_ = false;
  next_ = tasks_.size();
  if (!is_alone_) threads_.finish();
}

/// True if the caller should run the next task: the one that it waits for, or another that need not be waited for.
bool BatchSampler::is_worth_running(std::size_t end) const {
  const std::size_t next = next_.load(std::memory_order_relaxed);
  if (next >= std::min(end, tasks_.size())) return false;
  TokenConstraint* const constraint = tasks_[next].constraint;
  return next == num_taken_ || constraint == nullptr || constraint->wait_until({});
}

/// Returns false if no task is left to begin.
bool BatchSampler::run_next(int thread) {
  const std::size_t i = next_.fetch_add(1, std::memory_order_relaxed);
  if (i >= tasks_.size()) return false;
  run(tasks_[i], scratch_[thread], spans_[i]);
  spans_[i].is_done.store(1);
  return true;
}

/// Returns true if the constraint can be asked.
bool BatchSampler::await(TokenConstraint& constraint) {
  do {
    if (constraint.wait_until(std::min(deadline(), Clock::now() + kPoll))) {
      has_others_.store(true);
      return true;
    }
  } while (Clock::now() < deadline());
  return false;
}

void BatchSampler::run(const SamplingTask& task, SamplerScratch& scratch, SampledSpan& span) {
  try {
    if (task.samples) return sample_span(task, scratch, span);
    span.token_ids.push_back(task.sequence->tokens[task.position]);
    span.logprobs.push_back(report(task, scratch));
  } catch (const DeviceLost&) {
    span.failure = std::current_exception();
  } catch (const OutOfMemory&) {
    span.failure = std::current_exception();
  } catch (const std::exception& error) {
    if (task.samples && !span.token_ids.empty()) return;  // a step from the token before will fail by itself
    span.error = error.what();
  }
}

/// Returns the logits of a row, in memory of the host.
std::span<float> BatchSampler::logits_of(const SamplingTask& task, std::size_t row, SamplerScratch& scratch) const {
  float* const logits = task.logits.data() + static_cast<std::int64_t>(row) * stride_;
  if (device_sampler_ == nullptr) return {logits, task.logits.size()};
  scratch.fetched.resize(task.logits.size());
  device_.read(std::as_writable_bytes(std::span(scratch.fetched)), reinterpret_cast<std::byte*>(logits));
  return scratch.fetched;
}

TokenLogprobs BatchSampler::report(const SamplingTask& task, SamplerScratch& scratch) const {
  std::optional<TokenLogprobs> reported;
  if (device_sampler_ != nullptr) reported = device_sampler_->reported(task);
  if (reported) return *std::move(reported);
  const std::int32_t count = task.sequence->sampling.config().prompt_logprobs.value_or(0);
  return logprobs_of(logits_of(task, 0, scratch), task.sequence->tokens[task.position], count, scratch);
}

/// Samples a row of a task, or takes what the device has sampled.
SampleResult BatchSampler::sample_row(const SamplingTask& task, std::size_t row, SamplerScratch& scratch) const {
  std::optional<SampleResult> result;
  if (device_sampler_ != nullptr) result = device_sampler_->sampled(task, row);
  if (result) return *std::move(result);
  const std::int64_t position = task.position + static_cast<std::int64_t>(row);
  const auto before = std::span<const std::int32_t>(task.sequence->tokens).first(static_cast<std::size_t>(position));
  return sample(logits_of(task, row, scratch), task.sequence->sampling, before, position, scratch, task.constraint);
}

void BatchSampler::sample_span(const SamplingTask& task, SamplerScratch& scratch, SampledSpan& span) {
  Sequence& sequence = *task.sequence;
  const std::span<const std::int32_t> tokens(sequence.tokens);
  const auto drafts = tokens.subspan(static_cast<std::size_t>(task.position));
  bool agrees = true;  // the span agrees with the drafts so far
  const auto add = [&](std::int32_t token) {
    const std::size_t i = span.token_ids.size();
    agrees = agrees && (i >= drafts.size() || drafts[i] == token);
    span.token_ids.push_back(token);
    sequence.sampling.append(token);
  };
  const bool forces = task.constraint != nullptr && !sequence.sampling.config().logprobs;
  while (agrees && std::ssize(span.token_ids) < task.num_rows) {
    if (task.constraint != nullptr && !await(*task.constraint)) return;
    const std::int64_t i = std::ssize(span.token_ids);
    SampleResult result = sample_row(task, static_cast<std::size_t>(i), scratch);
    if (i < task.num_given) result.token = drafts[static_cast<std::size_t>(i)];
    if (task.constraint != nullptr) task.constraint->follow(result.token);
    add(result.token);
    if (result.logprobs) span.logprobs.push_back(std::move(*result.logprobs));
    while (forces && agrees) {  // after a wrong draft nothing is computed that could come before another token
      const std::optional<std::int32_t> token = task.constraint->take_forced();
      if (!token) break;
      add(*token);
    }
    if (task.constraint != nullptr && task.constraint->has_ended()) return;
  }
}

}  // namespace quire
