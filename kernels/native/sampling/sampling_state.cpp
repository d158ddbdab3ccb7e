#include "sampling/sampling_state.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <iterator>
#include <limits>
#include <stdexcept>
#include <string>
#include <unordered_set>

#include "sampling/sampling_ranges.h"

namespace quire {
namespace {

constexpr float kBanned = -std::numeric_limits<float>::infinity();
constexpr float kGreedyBelow = 1e-5f;          // vLLM's threshold; 1 / temperature must stay finite
constexpr std::int32_t kMostTokens = 1 << 23;  // largest vocabulary, so that the mass of all its tokens fits 64 bits

template <class T>
void require(bool good, const char* field, T given, const std::string& allowed) {
  if (!good) throw std::invalid_argument(std::string(field) + "=" + std::to_string(given) + "; it must be " + allowed);
}

/// Throws unless `value` is in the range, in the words of `Range.check` in protocol/options.py. NaN is in none.
template <class T>
void check_range(const char* field, T value, const sampling_ranges::Range& range) {
  const auto number = static_cast<float>(value);
  if ((range.closed ? number >= range.low : number > range.low) && number <= range.high) return;
  char digits[32];
  const std::string given(digits, std::to_chars(digits, std::end(digits), value).ptr);
  throw std::invalid_argument(std::string(field) + "=" + given + " is out of range; it must be " + range.text);
}

/// `logit`, with the largest finite number in place of an overflow: a penalty or bias may neither make a token certain
/// by an infinity nor ban it.
float finite(float logit) {
  return std::clamp(logit, std::numeric_limits<float>::lowest(), std::numeric_limits<float>::max());
}

/// The config with zeros in place of denormals, which are zeros wherever logits are processed.
SamplingConfig without_denormals(SamplingConfig config) {
  const auto flush = [](float& value) {
    if (std::abs(value) < std::numeric_limits<float>::min()) value = 0;
  };
  for (float* value : {&config.temperature, &config.top_p, &config.min_p, &config.repetition_penalty,
                       &config.presence_penalty, &config.frequency_penalty})
    flush(*value);
  for (auto& [token, bias] : config.logit_bias) flush(bias);
  return config;
}

void check_tokens(std::span<const std::int32_t> tokens, std::int32_t vocab_size, const char* field) {
  for (const std::int32_t token : tokens) {
    require(token >= 0 && token < vocab_size, field, token, "a token id from 0 to " + std::to_string(vocab_size - 1));
  }
}

void check(const SamplingConfig& config, std::int32_t vocab_size) {
  require(vocab_size >= 1 && vocab_size <= kMostTokens, "vocab_size", vocab_size,
          "1 to " + std::to_string(kMostTokens));
  const auto counts = "none, or 0 to the vocabulary's size " + std::to_string(vocab_size);
  const auto is_count = [vocab_size](const std::optional<std::int32_t>& count) {
    return !count || (*count >= 0 && *count <= vocab_size);
  };
  check_range("temperature", config.temperature, sampling_ranges::temperature);
  check_range("top_k", config.top_k, sampling_ranges::top_k);
  check_range("top_p", config.top_p, sampling_ranges::top_p);
  check_range("min_p", config.min_p, sampling_ranges::min_p);
  check_range("repetition_penalty", config.repetition_penalty, sampling_ranges::repetition_penalty);
  check_range("presence_penalty", config.presence_penalty, sampling_ranges::presence_penalty);
  check_range("frequency_penalty", config.frequency_penalty, sampling_ranges::frequency_penalty);
  check_range("min_tokens", config.min_tokens, sampling_ranges::min_tokens);
  require(is_count(config.logprobs), "logprobs", config.logprobs.value_or(0), counts);
  require(is_count(config.prompt_logprobs), "prompt_logprobs", config.prompt_logprobs.value_or(0), counts);
  std::unordered_set<std::int32_t> biased;
  for (const auto& [token, bias] : config.logit_bias) {
    check_tokens({&token, 1}, vocab_size, "logit_bias");
    check_range("logit_bias", bias, sampling_ranges::logit_bias);
    require(biased.insert(token).second, "logit_bias", token, "a token that has no other bias");
  }
  check_tokens(config.allowed_token_ids, vocab_size, "allowed_token_ids");
  check_tokens(config.stop_token_ids, vocab_size, "stop_token_ids");
  for (const auto& word : config.bad_words_token_ids) {
    require(!word.empty(), "bad_words_token_ids", word.size(), "at least one token each");
    check_tokens(word, vocab_size, "bad_words_token_ids");
  }
}

}  // namespace

SamplingState::SamplingState(SamplingConfig config, std::span<const std::int32_t> tokens,
                             std::int64_t num_prompt_tokens, std::int32_t vocab_size)
    : num_prompt_tokens_(num_prompt_tokens), vocab_size_(vocab_size) {
  check(config, vocab_size);
  config_ = without_denormals(std::move(config));
  require(num_prompt_tokens >= 0 && num_prompt_tokens <= std::ssize(tokens), "num_prompt_tokens", num_prompt_tokens,
          "at most the number of tokens, " + std::to_string(tokens.size()));
  counts_prompt_ = config_.repetition_penalty != 1;
  counts_outputs_ = counts_prompt_ || config_.presence_penalty != 0 || config_.frequency_penalty != 0;
  check_tokens(tokens, vocab_size, "token_ids");
  const std::size_t prompt = static_cast<std::size_t>(num_prompt_tokens);
  if (counts_prompt_) {
    for (const std::int32_t token : tokens.first(prompt)) count_of(token).in_prompt = true;
  }
  for (const std::int32_t token : tokens.subspan(prompt)) append(token);
}

void SamplingState::append(std::int32_t token) {
  if (counts_outputs_) ++count_of(token).outputs;
}

void SamplingState::remove(std::int32_t token) {
  if (counts_outputs_) --count_of(token).outputs;
}

SamplingState::Count& SamplingState::count_of(std::int32_t token) {
  const auto [found, is_new] = index_.try_emplace(token, counts_.size());
  if (is_new) counts_.push_back({token, false, 0});
  return counts_[found->second];
}

bool SamplingState::greedy() const { return config_.temperature < kGreedyBelow; }

bool SamplingState::samples_from_all() const {
  return !edits_logits() && (greedy() || (config_.top_k <= 0 && config_.top_p >= 1 && config_.min_p <= 0));
}

bool SamplingState::edits_logits() const {
  return counts_outputs_ || !config_.logit_bias.empty() || !config_.allowed_token_ids.empty() ||
         !config_.bad_words_token_ids.empty() || (config_.min_tokens > 0 && !config_.stop_token_ids.empty());
}

void SamplingState::process(std::span<float> logits, std::span<const std::int32_t> tokens,
                            std::vector<float>& saved) const {
  if (!config_.allowed_token_ids.empty()) keep_allowed(logits, saved);
  for_each_ban(tokens, [&](std::int32_t token) { logits[token] = kBanned; });
  for (const auto& [token, bias] : config_.logit_bias) {
    if (logits[token] != kBanned) logits[token] = finite(logits[token] + bias);
  }
  penalize(logits);
}

void SamplingState::keep_allowed(std::span<float> logits, std::vector<float>& saved) const {
  saved.clear();
  for (const std::int32_t token : config_.allowed_token_ids) saved.push_back(logits[token]);
  std::fill(logits.begin(), logits.end(), kBanned);
  for (std::size_t i = 0; i < saved.size(); ++i) logits[config_.allowed_token_ids[i]] = saved[i];
}

/// True if the last token of a word that must not come would be the next one: its earlier tokens are the latest of
/// `outputs`.
bool SamplingState::would_complete(std::span<const std::int32_t> word, std::span<const std::int32_t> outputs) {
  const auto start = word.first(word.size() - 1);
  return start.size() <= outputs.size() && std::ranges::equal(start, outputs.last(start.size()));
}

void SamplingState::penalize(std::span<float> logits) const {
  for_each_penalty([&](std::int32_t token, std::int32_t outputs) {
    float& logit = logits[token];
    if (logit == kBanned) return;
    const float penalty = config_.repetition_penalty;
    logit = finite(logit > 0 ? logit / penalty : logit * penalty);
    if (outputs == 0) return;
    logit = finite(logit - frequency_loss(outputs));
    logit = finite(logit - config_.presence_penalty);
  });
}

}  // namespace quire
