#include "compute/step_checks.h"

#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

namespace quire {
namespace {

/// The rows of a step, with what they are checked against.
class StepChecks {
 public:
  StepChecks(const StepRows& rows, const Sequences& sequences, const RunnerConfig& config)
      : rows_(rows), sequences_(sequences), config_(config) {}

  void check_rows() const;
  void check_branches() const;
  void check_size() const;

 private:
  void check_whole(std::int32_t slot, std::int64_t start, std::int64_t count) const;
  void check_drafts(std::int32_t slot, std::int64_t end, std::int64_t count, std::int64_t num_drafts) const;

  const StepRows& rows_;
  const Sequences& sequences_;
  const RunnerConfig& config_;
};

void StepChecks::check_rows() const {
  const auto& [slots, starts, counts, num_drafts, branches] = rows_;
  std::vector<std::int32_t> sorted(slots.begin(), slots.end());
  std::ranges::sort(sorted);
  if (const auto twice = std::ranges::adjacent_find(sorted); twice != sorted.end())
    throw std::invalid_argument("slot " + std::to_string(*twice) + " is in the batch twice");
  if (slots.size() != starts.size() || slots.size() != counts.size() ||
      (!num_drafts.empty() && slots.size() != num_drafts.size()))
    throw std::invalid_argument("slots, starts, counts and num_drafts differ in length");
  for (std::size_t i = 0; i < slots.size(); i++) {
    const Sequence& sequence = sequences_.at(slots[i]);
    const std::int64_t size = std::ssize(sequence.tokens);
    if (starts[i] < 0 || starts[i] > size || counts[i] < 1 || counts[i] > size - starts[i])
      throw std::invalid_argument("slot " + std::to_string(slots[i]) + ": " + std::to_string(counts[i]) +
                                  " tokens from " + std::to_string(starts[i]) + " on are not among its " +
                                  std::to_string(size));
    const std::int64_t end = starts[i] + counts[i];
    if (end > static_cast<std::int64_t>(sequence.pages.size()) * config_.block_size)
      throw std::invalid_argument("slot " + std::to_string(slots[i]) + ": its " +
                                  std::to_string(sequence.pages.size()) + " pages do not cover " + std::to_string(end) +
                                  " tokens; reserve them first");
    if (sequence.pooling && starts[i] > sequence.pooling->next())
      throw std::invalid_argument("slot " + std::to_string(slots[i]) + ": the hidden state of token " +
                                  std::to_string(sequence.pooling->next()) + " is to be pooled next, and token " +
                                  std::to_string(starts[i]) + " to be computed");
    if (config_.logit_stride == 0 && !sequence.pooling)
      throw std::invalid_argument("slot " + std::to_string(slots[i]) +
                                  " is to be sampled, but the model has no logits; only pool its hidden states");
    if (sequence.states && sequence.states->length() != starts[i])
      throw std::invalid_argument("slot " + std::to_string(slots[i]) + ": tokens from " + std::to_string(starts[i]) +
                                  " on cannot be computed from the state after " +
                                  std::to_string(sequence.states->length()));
    if (config_.bidirectional) check_whole(slots[i], starts[i], counts[i]);
    if (!num_drafts.empty() && num_drafts[i] != 0) check_drafts(slots[i], end, counts[i], num_drafts[i]);
  }
}

void StepChecks::check_branches() const {
  const auto& slots = rows_.slots;
  for (const DraftBranch& branch : rows_.branches) {
    const std::int64_t index = branch.index, length = std::ssize(branch.tokens);
    const bool has_drafts = index >= 0 && index < std::ssize(rows_.num_drafts) && rows_.num_drafts[index] > 0;
    const std::int64_t least = config_.lookahead ? 0 : 1;
    if (!has_drafts || sequences_.at(slots[index]).constraint || length < least || length >= config_.max_logit_rows)
      throw std::invalid_argument(
          "a branch of " + std::to_string(length) + " tokens for sequence " + std::to_string(index) + " of " +
          std::to_string(slots.size()) + "; it must have drafts and no constraint, and the branch from " +
          std::to_string(least) + " to " + std::to_string(config_.max_logit_rows - 1) + " tokens");
    for (const std::int32_t token : branch.tokens)
      if (token < 0 || token >= config_.vocab_size)
        throw std::invalid_argument("token id " + std::to_string(token) + " of a branch is not in the vocabulary");
  }
}

void StepChecks::check_size() const {
  std::int64_t total = std::accumulate(rows_.counts.begin(), rows_.counts.end(), std::int64_t{0});
  for (const DraftBranch& branch : rows_.branches) {
    const auto row = static_cast<std::size_t>(branch.index);
    const std::int64_t position = std::ssize(sequences_.at(rows_.slots[row]).tokens) - rows_.num_drafts[row];
    total += position - rows_.starts[row] + std::max<std::int64_t>(std::ssize(branch.tokens), 1);
  }
  if (total > config_.max_num_batched_tokens)
    throw std::invalid_argument("a step of " + std::to_string(total) + " tokens exceeds max_num_batched_tokens=" +
                                std::to_string(config_.max_num_batched_tokens));
}

void StepChecks::check_whole(std::int32_t slot, std::int64_t start, std::int64_t count) const {
  const Sequence& sequence = sequences_.at(slot);
  if (start != 0 || count != std::ssize(sequence.tokens) || sequence.root != RadixTree::kNone)
    throw std::invalid_argument("slot " + std::to_string(slot) + ": " + std::to_string(count) + " tokens from " +
                                std::to_string(start) + " on of " + std::to_string(sequence.tokens.size()) +
                                "; every token of an encoder attends to all others, so they are computed in one step, "
                                "and share no pages");
}

void StepChecks::check_drafts(std::int32_t slot, std::int64_t end, std::int64_t count, std::int64_t num_drafts) const {
  const Sequence& sequence = sequences_.at(slot);
  const std::int64_t size = std::ssize(sequence.tokens);
  const std::int64_t most = std::min({count - 1, size - sequence.num_prompt_tokens, config_.max_logit_rows - 1});
  if (num_drafts < 0 || num_drafts > most || end < size || sequence.pooling)
    throw std::invalid_argument("slot " + std::to_string(slot) + ": num_drafts=" + std::to_string(num_drafts) +
                                " of a chunk of " + std::to_string(count) + " tokens that ends at " +
                                std::to_string(end) + " of " + std::to_string(size) +
                                "; it must be 0 where the chunk does not reach the end or the prompt is pooled, and " +
                                "here at most " + std::to_string(std::max<std::int64_t>(most, 0)));
}

}  // namespace

void check_step(const StepRows& rows, const Sequences& sequences, const RunnerConfig& config) {
  const StepChecks checks(rows, sequences, config);
  checks.check_rows();
  checks.check_branches();
  checks.check_size();
}

}  // namespace quire
