#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "grammar/token_constraint.h"
#include "sampling/sampling_state.h"
#include "sampling/vocab_scan.h"

namespace quire {

/// What the model itself gave a token: log probabilities of its logits before any processing, at temperature 1.
struct TokenLogprobs {
  float logprob = 0;
  std::int32_t rank = 0;              ///< 1: the likeliest; of equally likely tokens the lower id comes first
  std::vector<std::int32_t> top_ids;  ///< the likeliest tokens, in order of rank
  std::vector<float> top_logprobs;
};

struct SampleResult {
  std::int32_t token = 0;
  std::optional<TokenLogprobs> logprobs;  ///< if config.logprobs is 0 or more
};

/// Draws the next token of a sequence. `logits` is the model's row and is overwritten; `tokens` are all of the sequence
/// so far; `position` is the index that the new token will have, which picks its random numbers.
///
/// The order of things is vLLM's: the constraint's mask, allowed tokens, bad words, min_tokens, bias, penalties, then
/// (unless greedy) temperature, min_p, top_k, top_p, each on what the ones before have left. The token is drawn by
/// running through what is left in order of ids. Equal logits are told apart by id everywhere, the lower one winning.
/// The result depends on the arguments alone, not on the CPU. Does not update `state`: see SamplingState::append.
///
/// `constraint`, if there is one, must not have to be waited for; the caller lets it follow the token. Where everything
/// that it allows is banned by what comes after it, it alone counts: what it demands is drawn, whatever else was asked
/// for. Where `state.samples_from_all()` a token is drawn as if there were no constraint, and another one among those
/// that are left if it is refused; only if the rule allows none of a few, one is drawn among all that its mask allows.
/// The distribution is the same, and most masks need not be written.
///
/// Throws std::runtime_error if a logit is NaN or infinite or if every token is banned.
SampleResult sample(std::span<float> logits, const SamplingState& state, std::span<const std::int32_t> tokens,
                    std::int64_t position, SamplerScratch& scratch, TokenConstraint* constraint = nullptr);

/// Log probability and rank of `token`, and the `top_n` likeliest tokens. Throws std::invalid_argument if `token` or
/// `top_n` is out of the vocabulary's range, std::runtime_error if a logit is NaN or infinite.
TokenLogprobs logprobs_of(std::span<const float> logits, std::int32_t token, std::int32_t top_n,
                          SamplerScratch& scratch);

}  // namespace quire
