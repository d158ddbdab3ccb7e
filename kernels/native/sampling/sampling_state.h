#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <optional>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

namespace quire {

/// Sampling parameters of one sequence. Meanings and defaults are vLLM's.
struct SamplingConfig {
  float temperature = 1.0f;  ///< 0: greedy, the likeliest token
  std::int32_t top_k = 0;    ///< 0 or -1: all
  float top_p = 1.0f;
  float min_p = 0.0f;
  float repetition_penalty = 1.0f;
  float presence_penalty = 0.0f;
  float frequency_penalty = 0.0f;
  std::vector<std::pair<std::int32_t, float>> logit_bias;
  std::vector<std::int32_t> allowed_token_ids;  ///< empty: all
  std::vector<std::vector<std::int32_t>> bad_words_token_ids;
  std::vector<std::int32_t> stop_token_ids;  ///< tokens that are banned until there are min_tokens outputs
  std::int32_t min_tokens = 0;
  std::uint64_t seed = 0;
  std::int64_t first_position = 0;              ///< where it begins in the sequence whose random numbers it uses
  std::optional<std::int32_t> logprobs;         ///< likeliest tokens to report with each sampled token; none: no report
  std::optional<std::int32_t> prompt_logprobs;  ///< the same for each token of the prompt; not read by the sampler
};

/// A SamplingConfig and the counts of one sequence's tokens that it needs. Costs nothing per token without penalties.
class SamplingState {
 public:
  /// `tokens` are the prompt, then the outputs so far. Throws std::invalid_argument with the name of an invalid field.
  SamplingState(SamplingConfig config, std::span<const std::int32_t> tokens, std::int64_t num_prompt_tokens,
                std::int32_t vocab_size);

  /// Counts an output token.
  void append(std::int32_t token);

  /// Takes back the count of an output token.
  void remove(std::int32_t token);

  const SamplingConfig& config() const { return config_; }
  std::int32_t vocab_size() const { return vocab_size_; }
  bool greedy() const;
  bool edits_logits() const;  ///< true if `process` can change a logit

  /// True if tokens are sampled from the whole vocabulary by the model's own logits, so that a ban leaves the relative
  /// probabilities of all other tokens as they are.
  bool samples_from_all() const;

  /// Bans (as -inf), biases and penalizes logits, in vLLM's order. `tokens` are all of the sequence; `saved` is
  /// scratch.
  void process(std::span<float> logits, std::span<const std::int32_t> tokens, std::vector<float>& saved) const;

  /// Calls ban(token) for each token that bad words and min_tokens ban after `tokens`, which are all of the sequence.
  template <class Ban>
  void for_each_ban(std::span<const std::int32_t> tokens, Ban ban) const {
    const auto outputs = tokens.subspan(static_cast<std::size_t>(num_prompt_tokens_));
    for (const auto& word : config_.bad_words_token_ids)
      if (would_complete(word, outputs)) ban(word.back());
    if (std::ssize(outputs) < config_.min_tokens) std::ranges::for_each(config_.stop_token_ids, ban);
  }

  /// Calls penalize(token, outputs) for each token that is penalized; `outputs`: how often it came after the prompt.
  template <class Penalize>
  void for_each_penalty(Penalize penalize) const {
    for (const auto& [token, in_prompt, outputs] : counts_)
      if (outputs > 0 || in_prompt) penalize(token, outputs);
  }

  /// Returns a number of bans, biases and penalties that there are at most.
  std::size_t most_edits() const {
    return config_.bad_words_token_ids.size() + config_.stop_token_ids.size() + config_.logit_bias.size() +
           counts_.size();
  }

  /// Returns what the outputs of a token take off its logit, but for the presence penalty.
  float frequency_loss(std::int32_t outputs) const { return config_.frequency_penalty * static_cast<float>(outputs); }

 private:
  struct Count {
    std::int32_t token;
    bool in_prompt;        ///< false unless the prompt is counted
    std::int32_t outputs;  ///< occurrences after the prompt
  };

  static bool would_complete(std::span<const std::int32_t> word, std::span<const std::int32_t> outputs);
  Count& count_of(std::int32_t token);
  void keep_allowed(std::span<float> logits, std::vector<float>& saved) const;
  void penalize(std::span<float> logits) const;

  SamplingConfig config_;
  std::int64_t num_prompt_tokens_;
  std::int32_t vocab_size_;
  bool counts_prompt_, counts_outputs_;
  std::vector<Count> counts_;  ///< dense array, since every step walks it; index_ says where a token's count is
  std::unordered_map<std::int32_t, std::size_t> index_;
};

}  // namespace quire
