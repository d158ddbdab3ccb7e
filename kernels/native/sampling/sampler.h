#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "grammar/token_constraint.h"
#include "sampling/sampling_state.h"
#include "sampling/vocab_scan.h"

namespace quire {

/// Log probabilities of one position: those of the model's own logits, before any processing, at temperature 1.
struct TokenLogprobs {
  float logprob = 0;
  std::int32_t rank = 0;              ///< 1: the likeliest; of equal logits the lower id comes first
  std::vector<std::int32_t> top_ids;  ///< the likeliest tokens, in order of rank
  std::vector<float> top_logprobs;
};

struct SampleResult {
  std::int32_t token = 0;
  std::optional<TokenLogprobs> logprobs;  ///< present if config.logprobs is 0 or more
};

/// Samples the next token of a sequence. `logits` is the model's row and is overwritten; `tokens` are all tokens of the
/// sequence so far; `position` is the index of the new token, which selects its random numbers.
///
/// The order is vLLM's: the constraint's mask, allowed tokens, bad words, min_tokens, bias, penalties, then (unless
/// greedy) temperature, min_p, top_k, top_p, each applied to what those before have left. The running sum of the
/// remaining probabilities, in order of ids, selects the token. Ties between logits go to the lower id everywhere. The
/// result depends on the arguments alone, not on the CPU. Does not update `state`: see SamplingState::append.
///
/// `constraint`, if there is one, must be ready to be asked; the caller lets it follow the token. Where the steps after
/// the mask ban all tokens that the mask allows, the mask alone counts. Where `state.samples_from_all()`, rejection
/// sampling tries a few tokens before it asks for the mask: the distribution is the same, and most masks need not be
/// written.
///
/// Throws std::runtime_error if a logit is NaN or infinite or if every token is banned.
SampleResult sample(std::span<float> logits, const SamplingState& state, std::span<const std::int32_t> tokens,
                    std::int64_t position, SamplerScratch& scratch, TokenConstraint* constraint = nullptr);

/// The random number `number` of the token at a position.
double random_number(const SamplingState& state, std::int64_t position, std::uint64_t number);

float inverse_temperature(const SamplingConfig& config);

/// How far below the largest logit min_p lets tokens be, in temperatures; beyond kReach they weigh nothing anyway.
float reach_of(const SamplingConfig& config);

/// Log probability and rank of `token`, and the `top_n` likeliest tokens. Throws std::invalid_argument if `token` or
/// `top_n` is out of the vocabulary's range, std::runtime_error if a logit is NaN or infinite.
TokenLogprobs logprobs_of(std::span<const float> logits, std::int32_t token, std::int32_t top_n,
                          SamplerScratch& scratch);

}  // namespace quire
