#pragma once

#include <cstdint>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

namespace quire {

/// How the tokens of one sequence are drawn. Meanings and defaults are vLLM's.
struct SamplingConfig {
  float temperature = 1.0f;  ///< 0: the likeliest token
  std::int32_t top_k = 0;    ///< 0 or -1: all
  float top_p = 1.0f;
  float min_p = 0.0f;
  float repetition_penalty = 1.0f;
  float presence_penalty = 0.0f;
  float frequency_penalty = 0.0f;
  std::vector<std::pair<std::int32_t, float>> logit_bias;
  std::vector<std::int32_t> allowed;  ///< empty: all
  std::vector<std::vector<std::int32_t>> bad_words;
  std::vector<std::int32_t> stop_token_ids;  ///< banned until min_tokens are out
  std::int32_t min_tokens = 0;
  std::uint64_t seed = 0;
  std::int32_t logprobs = -1;         ///< likeliest tokens to report with each token drawn; -1: report nothing
  std::int32_t prompt_logprobs = -1;  ///< the same for each token of the prompt; not read by the sampler
};

/// A SamplingConfig and what it needs to know of one sequence's tokens. Costs nothing per token without penalties.
class SamplingState {
 public:
  /// `tokens` are the prompt's, then those drawn so far. Throws std::invalid_argument naming the field that is wrong.
  SamplingState(SamplingConfig config, std::span<const std::int32_t> tokens, std::int64_t num_prompt_tokens,
                std::int32_t vocab_size);

  /// Counts a token that was drawn.
  void append(std::int32_t token);

  const SamplingConfig& config() const { return config_; }
  std::int32_t vocab_size() const { return vocab_size_; }
  bool greedy() const;
  bool counts_outputs() const { return counts_outputs_; }  ///< whether a penalty depends on the tokens drawn
  bool edits_logits() const;                               ///< whether `process` can change a logit

  /// Whether a token is drawn from all by their own logits, so that what is banned changes no other token's part.
  bool draws_from_all() const;

  /// Bans (as -inf), biases and penalises logits, in vLLM's order. `tokens` are all of the sequence; `saved` is
  /// scratch.
  void process(std::span<float> logits, std::span<const std::int32_t> tokens, std::vector<float>& saved) const;

 private:
  struct Count {
    std::int32_t token;
    std::int32_t outputs;  ///< times it was drawn; 0: only in the prompt
  };

  Count& count_of(std::int32_t token);
  void keep_allowed(std::span<float> logits, std::vector<float>& saved) const;
  void ban_bad_words(std::span<float> logits, std::span<const std::int32_t> outputs) const;
  void penalise(std::span<float> logits) const;

  SamplingConfig config_;
  std::int64_t num_prompt_tokens_;
  std::int32_t vocab_size_;
  bool counts_prompt_, counts_outputs_;
  std::vector<Count> counts_;  ///< dense, since every step walks it; index_ says where a token's count is
  std::unordered_map<std::int32_t, std::size_t> index_;
};

}  // namespace quire
