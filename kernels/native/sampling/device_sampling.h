#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "compute/abi.h"
#include "grammar/token_constraint.h"
#include "sampling/batch_sampler.h"
#include "sampling/sampler.h"

namespace quire {

/// Sampling requests for a device: one for each row of logits, and the edits and masks of all rows.
class SampleRequests {
 public:
  explicit SampleRequests(std::int32_t vocab_size) : vocab_size_(vocab_size) {}

  std::int32_t vocab_size() const { return vocab_size_; }
  std::size_t mask_words() const { return static_cast<std::size_t>((vocab_size_ + kMaskBits - 1) / kMaskBits); }
  void clear();

  /// Returns the request for a sample after `tokens`, which are all of the sequence. Under a constraint several tokens
  /// are tried where `sample` asks it about tokens, and else, or if it `was_tried` and has allowed none of them, its
  /// `mask` is needed. Returns kNothing without it, for more likeliest tokens than half of the vocabulary, of which the
  /// logits are less to copy, and if rows together may have more than edit_limit.
  SampleRow sample(const SamplingState& state, std::span<const std::int32_t> tokens, std::int64_t position,
                   bool is_constrained, const TokenMask* mask, bool was_tried = false);

  /// Returns the request for a row of a task once its constraint, if it has one, has allowed nothing that was tried. It
  /// must be ready to be asked for its mask.
  SampleRow sample_masked(const SamplingTask& task, std::size_t row);

  /// Returns the request for the log probabilities of a token and the `top` likeliest ones, or kNothing.
  SampleRow report(std::int32_t token, std::int32_t top) const;

  /// Writes the requests of a task's rows. Those that a device does not sample are kNothing.
  void add(const SamplingTask& task, std::span<SampleRow> rows);

  std::span<const LogitEdit> edits() const { return edits_; }
  std::span<const std::uint32_t> masks() const { return masks_; }

 private:
  SampleRow sample_row(const SamplingTask& task, std::size_t row, const TokenMask* mask, bool was_tried = false);
  bool can_report(std::int32_t top) const { return top <= std::max(kMostTop, vocab_size_ / 2); }
  std::int32_t add_mask(std::span<const std::uint32_t> words);
  std::int32_t add_mask(std::span<const std::int32_t> allowed);
  bool add_edits(const SamplingState& state, std::span<const std::int32_t> tokens, SampleRow& row);

  std::int32_t vocab_size_;
  std::vector<LogitEdit> edits_;
  std::vector<std::uint32_t> masks_;
};

/// Returns true if the host needs the mask of a constraint to sample, and so does a device.
bool needs_mask(const SamplingTask& task);

/// Has the mask of a task's constraint be written, if it is needed. It stays unknown if another thread still writes it,
/// or if there is an error, which the host meets as well.
void find_mask(SamplingTask& task);

/// Returns the token of a row that a device has sampled: the first of those that it tried which is allowed, or nothing
/// if none is.
std::optional<std::int32_t> token_of(const SampleRow& asked, const SampledRow& row, TokenConstraint* constraint);

/// Throws the error of the logits of a row if they are not good.
void check_good(const SampledRow& row, std::int32_t vocab_size);

/// Returns what `sample` would have returned with this token of a row, which must be `row.token` if log probabilities
/// were asked for.
SampleResult result_of(const SampleRow& asked, const SampledRow& row, std::int32_t token,
                       std::vector<LikelyToken> listed);

/// Returns what `logprobs_of` would have returned of the logits of a row with as many likeliest tokens as were asked
/// for; if more than kMostTop, they are those `listed`.
TokenLogprobs logprobs_of(const SampleRow& asked, const SampledRow& row, std::vector<LikelyToken> listed);

}  // namespace quire
