#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "compute/abi.h"
#include "compute/device.h"
#include "compute/draft_branches.h"
#include "compute/plan.h"
#include "compute/runner_config.h"
#include "compute/step.h"
#include "compute/step_gather.h"
#include "grammar/token_constraint.h"
#include "kv_cache/kv_cache.h"
#include "sampling/batch_sampler.h"
#include "sampling/device_sampler.h"
#include "sampling/sampler.h"

namespace quire {

/// Runs a model on a device: owns its sequences and plans.
class Runner {
 public:
  /// Throws std::invalid_argument that names the field of `config` that is out of range.
  Runner(const RunnerConfig& config, Device& device);  ///< the device must outlive it

  /// Maps KV memory. To be called once, before anything that needs it: another process may have the file until then,
  /// while this one loads its weights.
  void open_kv();

  Sequences& sequences() { return kv_cache().sequences; }
  const StepInputs& inputs() const { return inputs_; }
  const KvMemory& kv() const { return kv_cache().memory; }

  /// Throws std::logic_error before `open_kv`.
  const KvCache& kv_cache() const;
  KvCache& kv_cache() { return const_cast<KvCache&>(std::as_const(*this).kv_cache()); }

  /// Returns the first record of state; nullptr for a model without state, and before `open_kv`.
  std::byte* states() const;

  Plan& body() { return body_; }                         ///< plan from token ids to the hidden state
  Plan& head() { return head_; }                         ///< plan from the hidden state to logits, for `logit_rows`
  Plan& encoding() { return encoding_; }                 ///< plan from features to a draft head's initial hidden states
  Plan& hidden_states() { return hidden_states_; }       ///< plan from the hidden state to what `head` reads, in f32
  Plan& resampling() { return device_sampler_.plan(); }  ///< plan that samples one row of logits once more

  /// Lets the pooled vectors of an adapter's sequences go through a head of its own, or without one through the
  /// model's, which is that of adapter 0; between steps.
  void set_pooling_head(std::int32_t adapter, std::optional<PoolingHead> head);

  /// Turns attention entries of a step into KV splits and reductions where that keeps the device busy; `dims` count
  /// them. Blocks before the longest window get no split. Throws std::invalid_argument if they count more than there
  /// can be.
  void split_attention(Dims& dims) const { gather_.split_attention(dims); }

  /// Computes tokens [start, start + count) of each slot's sequence, KV included. Where that reaches the sequence's
  /// end, samples a span of tokens and appends it, or gives the pooled vector. Pages that are full now are shared.
  /// Throws std::invalid_argument for a batch that cannot be computed; nothing has changed then.
  ///
  /// The last `num_drafts` tokens of a sequence (none without that argument) are drafts. At each of them, and after the
  /// last, a token is sampled exactly as it would be without drafts, as long as the drafts are what was sampled; then
  /// come the tokens that the constraint forces, unless log probabilities are asked for. The span takes the place of
  /// the drafts, which are gone too where sampling or the whole step fails; the sequence keeps its pages. Of a sequence
  /// of n tokens afterwards, the first min(n - 1, start + count) are computed.
  ///
  /// A sequence with drafts, but without a constraint, may have `branches`: they are computed beside it, each from the
  /// same start on, and the path along which most tokens are what is sampled is the one that is kept. A branch that
  /// there are no pages for is left out.
  ///
  /// Constrained sequences are sampled last and deferred: the caller goes on with the others until it calls `collect`.
  /// Constraints follow the spans. A late one is waited for a little while if others have sampled: the span stays empty
  /// then, and the last token is to be computed again.
  StepResult step(const StepRows& rows);

  /// Adds deferred spans to the result of the last step and returns them by index: the next ones in the batch, as many
  /// as are sampled, but at least one, which is waited for. Returns none when none is pending; then all threads are
  /// idle. Throws std::invalid_argument for the result of another step; if it throws anything else, nothing is sampled
  /// for those that are still pending.
  std::map<std::int32_t, std::vector<std::int32_t>> collect(StepResult& result);

  /// Encodes the features of the next step's first rows, which have been written. Throws std::invalid_argument if there
  /// are more than a step computes.
  void encode(std::int64_t num_tokens);

  /// From now on each draft is taken for right with this probability if those before it are, whatever is sampled. For
  /// benchmarks only. Throws std::invalid_argument unless it is from 0 to 1.
  void set_synthetic_acceptance(double probability);

  /// Sets whether the next steps keep hidden states for a draft head, as they do at first; it takes a part of their
  /// time.
  void set_keeps_features(bool keeps) { keeps_features_ = keeps; }

 private:
  void take_for_right();
  void pool_states(const StepRows& rows, StepResult& result);
  void pool_state(std::int32_t index, Sequence& sequence, std::span<const float> state, StepResult& result);
  void run_body(const Dims& dims);
  void compute_logits(std::span<SamplingTask> tasks);
  void sample(TokenConstraint::Clock::time_point begun, StepResult& result);
  std::int32_t take_next(std::size_t end, StepResult& result);
  void take_span(const SamplingTask& task, SampledSpan& span, StepResult& result);
  void share_computed();
  void cancel();

  RunnerConfig config_;
  Device& device_;
  std::optional<KvCache> kv_cache_;
  StepInputs inputs_;
  Plan body_, head_, encoding_, hidden_states_;
  std::map<std::int32_t, PoolingHead> pooling_heads_{{0, {}}};  ///< by number of the adapter
  std::int64_t step_number_ = 0;                                ///< number of the last step
  StepGather gather_;                                           ///< rows of the last step, and its tasks
  DraftBranches branches_;
  std::size_t num_taken_ = 0;           ///< number of first tasks whose outcomes have been taken
  std::vector<ComputedSlot> computed_;  ///< slots whose pages are to be shared
  DeviceSampler device_sampler_;        ///< if the device samples
  BatchSampler sampler_;
  bool keeps_features_ = true;
  std::optional<double> synthetic_acceptance_;
  std::minstd_rand synthetic_random_;
};

}  // namespace quire
