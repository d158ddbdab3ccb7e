#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "compute/abi.h"
#include "compute/device.h"
#include "compute/plan.h"
#include "compute/runner_config.h"
#include "sampling/batch_sampler.h"
#include "sampling/device_sampling.h"

namespace quire {

/// Samples rows of logits where a device has them: all rows of a step at once, and single ones once more where a
/// constraint allows none of the tokens, or not the first, whose log probabilities alone are known, where its mask was
/// not known before, and where rows have too many edits together.
class DeviceSampler {
 public:
  /// `inputs` must outlive it, and have room for `max_logit_rows` rows before it is used, and for one that is sampled
  /// once more.
  DeviceSampler(Device& device, const StepInputs& inputs, const RunnerConfig& config)
      : device_(device),
        inputs_(inputs),
        logit_stride_(config.logit_stride),
        requests_(config.vocab_size),
        once_more_(static_cast<std::size_t>(config.max_logit_rows)) {}

  std::size_t mask_words() const { return requests_.mask_words(); }  ///< of the mask of a row

  /// Returns the plan that samples the last row of `inputs` once more. It must have a single launch, beside which other
  /// threads may copy pages: see CudaSteps.
  Plan& plan() { return plan_; }

  /// Writes what the device is to sample of the rows of the tasks, which have all rows of logits, in order.
  void ask(std::span<SamplingTask> tasks);

  /// Returns what `sample` would return of a row of a task, whose constraint is ready to be asked, or nothing if the
  /// device does not sample such rows. Throws what `sample` throws, and what a device does. Any thread, while neither
  /// this runner nor another one of the device runs a plan.
  std::optional<SampleResult> sampled(const SamplingTask& task, std::size_t row);

  /// Returns the log probabilities that a task reports, or nothing, likewise.
  std::optional<TokenLogprobs> reported(const SamplingTask& task) const;

 private:
  std::vector<LikelyToken> listed(const SampleRow& row) const;
  void write(const SampleRequests& requests) const;
  SampledRow sample_again(const SampleRequests& requests, const SampleRow& row);

  Device& device_;
  const StepInputs& inputs_;
  Plan plan_;
  std::int64_t logit_stride_;
  SampleRequests requests_;  ///< of a step
  std::size_t once_more_;    ///< number of the row that is sampled once more
  std::mutex mutex_;         ///< held while a row is sampled once more
};

}  // namespace quire
