#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "compute/abi.h"
#include "sampling/batch_sampler.h"
#include "sampling/sampler.h"

namespace quire {

/// What a device is to sample of rows of logits, with the edits and masks of all of them.
class SampleRequests {
 public:
  explicit SampleRequests(std::int32_t vocab_size)
      : mask_words_((static_cast<std::size_t>(vocab_size) + kPackedBlock - 1) / kPackedBlock) {}

  std::size_t mask_words() const { return mask_words_; }  ///< words of a mask
  void clear();

  /// Returns what the function of this name does with the same arguments, under a constraint with this mask, or if it
  /// is empty without one. Returns nothing if that takes more than a device does: it reports at most kMostTop likeliest
  /// tokens, and rows together have at most kMostEdits edits.
  SampleRow sample(const SamplingState& state, std::span<const std::int32_t> tokens, std::int64_t position,
                   std::span<const std::uint32_t> mask);

  /// Returns what `logprobs_of` does with a token of the prompt, or nothing.
  SampleRow report(const SamplingState& state, std::int32_t token) const;

  /// Writes what is to be sampled of the rows of a task, but for those that are not reached: nothing if a device can't
  /// sample all others.
  void add(const SamplingTask& task, std::span<SampleRow> rows);

  std::span<const LogitEdit> edits() const { return edits_; }
  std::span<const std::uint32_t> masks() const { return masks_; }

 private:
  std::int32_t add_mask(std::span<const std::uint32_t> words);
  std::int32_t add_mask(std::span<const std::int32_t> allowed);
  bool add_edits(const SamplingState& state, std::span<const std::int32_t> tokens, SampleRow& row);

  std::size_t mask_words_;
  std::vector<LogitEdit> edits_;
  std::vector<std::uint32_t> masks_;
};

/// Writes the masks of a task, unless its constraint is late or fails.
void write_masks(SamplingTask& task);

/// Returns what `sample` would have returned; `top_n`: config.logprobs.
SampleResult result_of(const SampledRow& row, std::optional<std::int32_t> top_n);

/// Returns what `logprobs_of` would have returned of the logits.
TokenLogprobs logprobs_of(const SampledRow& row, std::int32_t top_n);

}  // namespace quire
