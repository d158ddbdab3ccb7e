#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "sampling/sampler.h"

namespace quire {

/// Log probabilities at one position, with the token that stands there.
struct Position {
  std::int32_t token;
  TokenLogprobs logprobs;
};

/// Tokens that may come instead of a sequence's drafts: another path in the tree of both. Without tokens, the lookahead
/// token of the draft head, computed in the place of the first draft; nothing is sampled of it.
struct DraftBranch {
  std::int32_t index;  ///< index of the sequence in the batch
  std::vector<std::int32_t> tokens;
};

/// The input of a step: a row for each sequence, as columns of equal length. Row i computes tokens [start, start +
/// count) of the sequence in its slot.
struct StepRows {
  std::span<const std::int32_t> slots;
  std::span<const std::int64_t> starts, counts;
  std::span<const std::int64_t> num_drafts = {};  ///< drafts of each row, its last tokens; empty: no row has any
  std::span<const DraftBranch> branches = {};

  std::size_t size() const { return slots.size(); }
  std::int64_t drafts(std::size_t row) const { return num_drafts.empty() ? 0 : num_drafts[row]; }
};

/// The outcome of a step, by index in the batch.
struct StepResult {
  std::int64_t number = 0;                                        ///< number of the step among those of all runners
  std::vector<std::vector<std::int32_t>> token_ids;               ///< span of each sequence: the tokens that it got
  std::vector<std::vector<TokenLogprobs>> logprobs;               ///< log probabilities of span tokens, where wanted
  std::vector<std::int32_t> pending;                              ///< indices whose spans `collect` is to add
  std::map<std::int32_t, std::vector<Position>> prompt_logprobs;  ///< log probabilities of prompt tokens
  std::map<std::int32_t, std::string> errors;                     ///< reasons why nothing could be sampled or pooled
  std::vector<std::int32_t> first_rows;                 ///< row of each sequence's first kept token in the step
  std::map<std::int32_t, std::int32_t> lookahead_rows;  ///< row of each sequence's lookahead token in the step
  std::map<std::int32_t, std::vector<float>> pooled;    ///< vectors of pooled sequences that are computed to their end
};

}  // namespace quire
