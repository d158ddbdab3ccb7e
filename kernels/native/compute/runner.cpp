#include "compute/runner.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <functional>
#include <numeric>
#include <stdexcept>
#include <utility>

#include "compute/step_checks.h"

namespace quire {
namespace {

constexpr int kPatience = 20;  // 1 / kPatience of a step is spent on waiting for a late constraint

std::int64_t next_step_number() {
  static std::atomic<std::int64_t> number{0};
  return ++number;
}

}  // namespace

Runner::Runner(const RunnerConfig& config, Device& device)
    : config_(checked(config)),
      device_(device),
      gather_(config_, inputs_, device),
      device_sampler_(device, inputs_, config_),
      sampler_(device, config_.samples_on_device ? &device_sampler_ : nullptr) {
  const auto tokens = static_cast<std::size_t>(config.max_num_batched_tokens);
  const auto rows = static_cast<std::size_t>(config.max_logit_rows);
  auto array = [&]<class T>(T*& target, std::size_t count) {
    target = reinterpret_cast<T*>(device_.allocate_exchanged(in_lines(count * sizeof(T))));  // kernels read whole words
  };
  array(inputs_.token_ids, tokens);
  array(inputs_.positions, tokens);
  array(inputs_.token_types, tokens);
  array(inputs_.row_adapters, tokens);
  array(inputs_.kv_slots, tokens);
  array(inputs_.entries, tokens);
  array(inputs_.kv_splits, kMaxKvSplits);
  array(inputs_.reductions, kMaxKvSplits);
  const std::size_t with_state = config.state ? tokens : 0;
  array(inputs_.state_entries, with_state);
  array(inputs_.state_writes, kStateWrites * with_state);
  array(inputs_.logit_rows, rows);
  const std::size_t num_logits = rows * static_cast<std::size_t>(config.logit_stride);
  if (!config.samples_on_device) {
    array(inputs_.logits, num_logits);
  } else if (num_logits > 0) {
    array(inputs_.sample_rows, rows + 1);
    array(inputs_.sampled_rows, rows + 1);
    const auto own = [&]<class T>(T*& target, std::size_t count) {
      target = reinterpret_cast<T*>(device_.allocate(count * sizeof(T)));
    };
    own(inputs_.logits, num_logits);
    own(inputs_.changed_logits, num_logits);
    own(inputs_.logit_edits, static_cast<std::size_t>(edit_limit(config.vocab_size)));
    own(inputs_.token_masks, kRowMasks * rows * device_sampler_.mask_words());
  }
  array(inputs_.hidden_states, rows * static_cast<std::size_t>(config.hidden_size));
}

void Runner::open_kv() {
  kv_cache_.emplace(KvConfig{{config_.kv_layers, config_.block_size, config_.num_pages},
                             config_.block_size,
                             config_.vocab_size,
                             config_.state.value_or(StateShape{}),
                             config_.kv_memory_fd,
                             config_.kv_model,
                             config_.sealed_queues},
                    device_);
}

const KvCache& Runner::kv_cache() const {
  if (!kv_cache_) throw std::logic_error("there is no KV memory before open_kv");
  return *kv_cache_;
}

std::byte* Runner::states() const {
  const StateStore* store = kv_cache_ ? kv_cache_->sequences.states() : nullptr;
  return store == nullptr ? nullptr : store->memory();
}

StepResult Runner::step(const StepRows& rows) {
  const auto begun = TokenConstraint::Clock::now();
  if (sampler_.has_left()) throw std::logic_error("collect what is pending of the last step before the next one");
  check_step(rows, sequences(), config_);
  kv_cache_->prefault();
  num_taken_ = 0;
  computed_.clear();
  gather_.begin(*kv_cache_);
  for (std::size_t i = 0; i < rows.size(); i++)
    gather_.add(static_cast<std::int32_t>(i), rows.slots[i], rows.starts[i], rows.counts[i], rows.drafts(i));
  StepResult result;
  result.number = step_number_ = next_step_number();
  try {
    branches_.open(rows, *kv_cache_, gather_, result.lookahead_rows);
    result.token_ids.resize(rows.size() + branches_.size());
    result.logprobs.resize(rows.size() + branches_.size());
    if (synthetic_acceptance_) take_for_right();
    Dims& dims = gather_.dims();
    if (keeps_features_) dim(dims, Dim::kept_tokens) = dim(dims, Dim::tokens);
    split_attention(dims);
    gather_.write_states();
    run_body(dims);
    pool_states(rows, result);
    sample(begun, result);
  } catch (...) {
    cancel();
    gather_.take_back_states();
    branches_.close(sequences());
    throw;
  }
  const std::size_t num_indices = rows.size() + branches_.size();
  branches_.take(rows, *kv_cache_, gather_.first_rows(), computed_, result);
  std::vector<bool> samples(num_indices);  // true where a token is sampled, now or later: pages are shared then
  for (const SamplingTask& task : gather_.tasks()) samples[task.index] = samples[task.index] || task.samples;
  for (std::size_t i = 0; i < rows.size(); i++)
    if (!samples[i] && !result.errors.contains(static_cast<std::int32_t>(i)))
      computed_.emplace_back(rows.slots[i], rows.starts[i] + rows.counts[i]);
  share_computed();
  return result;
}

std::map<std::int32_t, std::vector<std::int32_t>> Runner::collect(StepResult& result) {
  if (result.number != step_number_)
    throw std::invalid_argument("the result of step " + std::to_string(result.number) +
                                " is not that of the last step, number " + std::to_string(step_number_) +
                                "; collect each result before the next step");
  std::map<std::int32_t, std::vector<std::int32_t>> spans;
  try {
    while (sampler_.has_left() && (spans.empty() || sampler_.is_next_done())) {
      const std::int32_t index = take_next(gather_.tasks().size(), result);
      std::erase(result.pending, index);
      spans[index] = result.token_ids[index];
    }
  } catch (...) {
    cancel();
    throw;
  }
  share_computed();
  return spans;
}

void Runner::encode(std::int64_t num_tokens) {
  if (num_tokens < 0 || num_tokens > config_.max_num_batched_tokens)
    throw std::invalid_argument("num_tokens=" + std::to_string(num_tokens) + "; it must be from 0 to " +
                                std::to_string(config_.max_num_batched_tokens));
  Dims dims{};
  dim(dims, Dim::max_num_batched_tokens) = config_.max_num_batched_tokens;
  dim(dims, Dim::tokens) = num_tokens;
  device_.run(encoding_, dims);
}

void Runner::set_synthetic_acceptance(double probability) {
  if (!(probability >= 0 && probability <= 1))
    throw std::invalid_argument("a synthetic acceptance must be a probability, from 0 to 1");
  synthetic_acceptance_ = probability;
}

void Runner::take_for_right() {
  std::uniform_real_distribution<double> random;
  for (SamplingTask& task : gather_.tasks())
    while (task.num_given < task.num_rows - 1 && random(synthetic_random_) < *synthetic_acceptance_) task.num_given++;
}

void Runner::set_pooling_head(std::int32_t adapter, std::optional<PoolingHead> head) {
  if (head || adapter == 0)
    pooling_heads_.insert_or_assign(adapter, std::move(head).value_or(PoolingHead{}));
  else
    pooling_heads_.erase(adapter);
}

void Runner::pool_states(const StepRows& rows, StepResult& result) {
  Dims& dims = gather_.dims();
  const std::span<const StateRow> states = gather_.state_rows();
  const auto at_once = static_cast<std::size_t>(config_.max_logit_rows);
  const auto size = static_cast<std::size_t>(config_.hidden_size);
  for (std::size_t first = 0; first < states.size(); first += at_once) {
    const auto part = states.subspan(first, std::min(states.size() - first, at_once));
    for (std::size_t i = 0; i < part.size(); i++) inputs_.logit_rows[i] = part[i].row;
    dim(dims, Dim::logit_rows) = static_cast<std::int64_t>(part.size());
    device_.run(hidden_states_, dims);
    for (std::size_t i = 0; i < part.size(); i++)
      pool_state(part[i].index, sequences().at(rows.slots[part[i].index]), {inputs_.hidden_states + i * size, size},
                 result);
  }
}

void Runner::pool_state(std::int32_t index, Sequence& sequence, std::span<const float> state, StepResult& result) {
  sequence.pooling->add(state);
  if (sequence.pooling->next() < sequence.pooling->end()) return;
  try {
    const auto own = pooling_heads_.find(sequence.adapter);
    result.pooled[index] = sequence.pooling->vector(own == pooling_heads_.end() ? pooling_heads_.at(0) : own->second);
  } catch (const std::runtime_error& error) {
    result.errors[index] = error.what();
    gather_.take_back_state(index);
  }
}

/// Runs the body. For a device that samples, threads of the host write masks, which else would be idle.
void Runner::run_body(const Dims& dims) {
  std::vector<SamplingTask>& tasks = gather_.tasks();
  if (!config_.samples_on_device || std::ranges::none_of(tasks, needs_mask)) return device_.run(body_, dims);
  std::atomic<std::size_t> next{0};
  auto write = [&](int) {
    for (std::size_t i; (i = next++) < tasks.size();) find_mask(tasks[i]);
  };
  ThreadPool& threads = device_.threads();
  threads.begin([](void* function, int thread) { (*static_cast<decltype(write)*>(function))(thread); }, &write);
  try {
    device_.run(body_, dims);
  } catch (...) {
    threads.finish();
    throw;
  }
  threads.finish();
}

void Runner::compute_logits(std::span<SamplingTask> tasks) {
  Dims& dims = gather_.dims();
  std::int64_t& rows = dim(dims, Dim::logit_rows) = 0;
  for (SamplingTask& task : tasks) {
    task.logits = {inputs_.logits + rows * config_.logit_stride, static_cast<std::size_t>(config_.vocab_size)};
    for (std::int32_t i = 0; i < task.num_rows; i++) inputs_.logit_rows[rows++] = task.first_row + i;
  }
  if (config_.samples_on_device) device_sampler_.ask(tasks);
  device_.run(head_, dims);
}

/// Constrained sequences are left to `collect`, unless their logits would be overwritten before.
void Runner::sample(TokenConstraint::Clock::time_point begun, StepResult& result) {
  std::vector<SamplingTask>& all = gather_.tasks();
  const bool has_others = std::ranges::any_of(all, std::logical_not{}, &SamplingTask::constraint);
  for (std::size_t first = 0, last = 0; first < all.size(); first = last) {
    for (std::int64_t rows = 0; last < all.size(); last++)
      if ((rows += all[last].num_rows) > config_.max_logit_rows) break;
    const auto tasks = std::span(all).subspan(first, last - first);
    compute_logits(tasks);
    const auto constrained = std::ranges::stable_partition(tasks, std::logical_not{}, &SamplingTask::constraint);
    const auto now = TokenConstraint::Clock::now();
    sampler_.begin(tasks, config_.logit_stride, now + (now - begun) / kPatience, has_others);
    const bool is_last = last == all.size();
    const std::size_t end = is_last ? tasks.size() - constrained.size() : tasks.size();
    for (std::size_t i = 0; i < end; i++) take_next(end, result);
    if (is_last)
      for (const SamplingTask& task : constrained) result.pending.push_back(task.index);
  }
}

/// Returns the index of the sequence whose outcome it has taken.
std::int32_t Runner::take_next(std::size_t end, StepResult& result) {
  const SamplingTask& task = sampler_.next_task();
  SampledSpan& span = sampler_.take(end);
  num_taken_++;
  if (span.failure) {
    if (task.samples) take_back(task, span);
    gather_.take_back_state(task.index);
    std::rethrow_exception(span.failure);
  }
  const bool has_failed = result.errors.contains(task.index);
  if (!has_failed && span.error.empty()) {
    take_span(task, span, result);
    return task.index;
  }
  if (!has_failed) result.errors[task.index] = std::move(span.error);
  if (task.samples) take_back(task, span);
  gather_.take_back_state(task.index);
  return task.index;
}

/// Shares pages only now that nothing can fail any more: a step that fails can be computed again.
void Runner::share_computed() {
  for (const auto& [slot, num_computed] : computed_) {
    sequences().share(slot, num_computed);
    if (sequences().num_computed_tokens(slot) < num_computed) sequences().resume(slot, num_computed);  // lacks a state
  }
  computed_.clear();
  if (!sampler_.has_left()) kv_cache_->seal();
}

void Runner::take_span(const SamplingTask& task, SampledSpan& span, StepResult& result) {
  Sequence& sequence = *task.sequence;
  if (!task.samples) {
    result.prompt_logprobs[task.index].push_back({span.token_ids.front(), std::move(span.logprobs.front())});
    sequence.prompt_logprobs_done = task.position + 1;
    return;
  }
  sequence.tokens.resize(static_cast<std::size_t>(task.position));  // without drafts: those that hold are in the span
  sequence.tokens.insert(sequence.tokens.end(), span.token_ids.begin(), span.token_ids.end());
  sequence.num_followed = std::ssize(sequence.tokens);
  computed_.emplace_back(task.slot, std::min(sequence.num_followed - 1, task.position + task.num_rows - 1));
  result.token_ids[task.index] = std::move(span.token_ids);
  result.logprobs[task.index] = std::move(span.logprobs);
}

/// Ends sampling. Sequences whose outcome has not been taken keep neither drafts nor sampled tokens.
void Runner::cancel() {
  sampler_.cancel();
  for (const SamplingTask& task : std::span(gather_.tasks()).subspan(num_taken_))
    if (task.samples) {
      task.sequence->tokens.resize(static_cast<std::size_t>(task.position));
      gather_.take_back_state(task.index);
    }
}

}  // namespace quire
