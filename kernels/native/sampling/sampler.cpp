#include "sampling/sampler.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>

#include "compute/abi.h"
#include "compute/denormals.h"
#include "grammar/token_constraint.h"
#include "sampling/logit_math.h"
#include "sampling/philox.h"

namespace quire {
namespace {

constexpr std::size_t kSparse = 8;  ///< masks that allow at most 1 / kSparse of the vocabulary are read by token

/// The place of the sampled token in the running sum of mass.
std::uint64_t target(double random, std::uint64_t total) {
  return std::min(static_cast<std::uint64_t>(random * static_cast<double>(total)), total - 1);
}

std::int32_t pick(std::span<const Candidate> candidates, double random) {
  std::uint64_t left = target(random, total_mass(candidates));
  auto candidate = candidates.begin();
  for (; left >= candidate->mass; ++candidate) left -= candidate->mass;
  return token_of(candidate->key);
}

std::uint64_t share(std::uint64_t total, float top_p) {
  const double needed = std::ceil(static_cast<double>(total) * static_cast<double>(top_p));
  return std::clamp<std::uint64_t>(static_cast<std::uint64_t>(needed), 1, total);
}

/// Samples one token from a row of processed logits.
class RowSampler {
 public:
  RowSampler(VocabScan& scan, const SamplingConfig& config, double random, SamplerScratch& scratch)
      : scan_(scan),
        config_(config),
        inverse_temperature_(inverse_temperature(config)),
        random_(random),
        scratch_(scratch) {}

  std::int32_t token() {
    if (config_.min_p <= 0 && config_.top_k <= 0 && config_.top_p >= 1) return from_all();
    return pick(candidates(), random_);
  }

 private:
  std::int32_t from_all() {
    return scan_.token_at(target(random_, scan_.weigh(inverse_temperature_)), inverse_temperature_);
  }

  /// The candidates that min_p, top_k and top_p leave, by id and with their mass.
  std::span<Candidate> candidates() {
    if (config_.top_k <= 0 && config_.min_p <= 0) return nucleus_of_all();
    std::int32_t least = kLeastKey;
    const float reach = reach_of(config_);
    if (config_.min_p > 0) least = key_at(reach);
    if (config_.top_k > 0) least = std::max(least, scan_.key_reached_by(config_.top_k));
    auto left = filter(scan_.collect(least), [&](const Candidate& c) {
      return (logit_of(c.key) - scan_.max()) * inverse_temperature_ >= -reach;
    });
    if (config_.top_k > 0) left = likeliest(left, static_cast<std::size_t>(config_.top_k), scratch_.sorted);
    weigh(left, scan_.max(), inverse_temperature_);
    if (config_.top_p >= 1) return left;
    return nucleus(left, share(total_mass(left), config_.top_p), scratch_.sorted);
  }

  /// top_p alone. Looks near the maximum first: where probability is concentrated, few tokens have to be collected.
  std::span<Candidate> nucleus_of_all() {
    const std::uint64_t needed = share(scan_.weigh(inverse_temperature_), config_.top_p);
    for (float reach = 4.0f;; reach *= 2) {
      const auto near = scan_.collect(reach < kReach ? key_at(reach) : kLeastKey);
      weigh(near, scan_.max(), inverse_temperature_);
      if (total_mass(near) >= needed) return nucleus(near, needed, scratch_.sorted);
    }
  }

  /// An order key that no logit within `reach` temperatures of the maximum falls below: it is rounded down.
  std::int32_t key_at(float reach) const {
    const double logit = static_cast<double>(scan_.max()) -
                         static_cast<double>(config_.temperature) * static_cast<double>(reach) * (1 + 1e-6);
    return std::max(kLeastKey, order_key(static_cast<float>(logit)) - 1);
  }

  VocabScan& scan_;
  const SamplingConfig& config_;
  const float inverse_temperature_;
  const double random_;
  SamplerScratch& scratch_;
};

bool reports(const SamplingState& state) { return state.config().logprobs.has_value(); }

/// The result of sampling `token` where `raw` are the model's own logits.
SampleResult report(std::int32_t token, std::span<const float> raw, const SamplingState& state,
                    SamplerScratch& scratch) {
  SampleResult result{.token = token, .logprobs = {}};
  if (reports(state)) result.logprobs = logprobs_of(raw, token, *state.config().logprobs, scratch);
  return result;
}

/// Samples from processed logits with random number `number` of the position; `raw` are the model's own logits.
SampleResult sample_processed(std::span<const float> logits, std::span<const float> raw, const SamplingState& state,
                              std::int64_t position, std::uint64_t number, SamplerScratch& scratch) {
  VocabScan scan(logits, scratch);
  if (scan.max_key() <= kLeastKey) throw_all_banned(logits.size());
  const SamplingConfig& config = state.config();
  const double random = random_number(state, position, number);
  return report(state.greedy() ? scan.argmax() : RowSampler(scan, config, random, scratch).token(), raw, state,
                scratch);
}

/// Samples from the tokens that the mask allows, after rejection sampling has found none; may overwrite the logits.
/// Throws std::runtime_error if the mask allows nothing.
SampleResult sample_allowed(std::span<float> logits, const SamplingState& state, std::int64_t position,
                            SamplerScratch& scratch, const TokenMask& mask) {
  if (mask.num_allowed() > logits.size() / kSparse) {
    if (reports(state)) scratch.raw.assign(logits.begin(), logits.end());
    mask.apply(logits);
    return sample_processed(logits, scratch.raw, state, position, kMostTries, scratch);
  }
  std::vector<Candidate>& allowed = scratch.candidates;
  allowed.clear();
  mask.for_each_allowed([&](std::int32_t token) {
    if (token >= std::ssize(logits)) return;
    const std::int32_t key = order_key(logits[token]);
    if (key > kLeastKey) allowed.push_back({token_key(key, token), 0});
  });
  if (allowed.empty()) throw_all_banned(logits.size());
  const std::uint64_t likeliest_key = std::ranges::min_element(allowed, likelier)->key;
  if (state.greedy()) return report(token_of(likeliest_key), logits, state, scratch);
  weigh(allowed, logit_of(likeliest_key), inverse_temperature(state.config()));
  const std::int32_t token = pick(allowed, random_number(state, position, kMostTries));
  return report(token, logits, state, scratch);
}

/// Rejection sampling: samples from the whole vocabulary, and where the constraint does not allow the token, from the
/// rest of it. The rest keeps its relative probabilities, so the distribution is that of the allowed tokens alone.
class RejectionSampler {
 public:
  RejectionSampler(std::span<float> logits, const SamplingState& state, std::int64_t position, SamplerScratch& scratch)
      : logits_(logits), state_(state), position_(position), scan_(logits, scratch) {
    if (scan_.max_key() <= kLeastKey) throw_all_banned(logits.size());
    if (state.greedy()) return;
    scale_ = inverse_temperature(state.config());
    mass_ = scan_.weigh(scale_);
    least_mass_ = mass_ >> kLeastShareBits;
  }

  std::optional<std::int32_t> first_allowed(TokenConstraint& constraint) {
    for (std::uint64_t number = 0; number < kMostTries && is_left(); number++) {
      const std::int32_t token = next(number);
      if (constraint.allows(token)) return token;
      reject(token);
    }
    return std::nullopt;
  }

  /// Restores the logits of rejected tokens.
  ~RejectionSampler() {
    for (const auto& [token, logit] : rejected_) logits_[token] = logit;
  }
  RejectionSampler(const RejectionSampler&) = delete;
  RejectionSampler& operator=(const RejectionSampler&) = delete;

 private:
  bool is_left() const { return state_.greedy() ? scan_.any() : mass_ > least_mass_; }

  std::int32_t next(std::uint64_t number) const {
    if (state_.greedy()) return scan_.argmax();
    return scan_.token_at(target(random_number(state_, position_, number), mass_), scale_);
  }

  void reject(std::int32_t token) {
    rejected_.emplace_back(token, logits_[token]);
    logits_[token] = -std::numeric_limits<float>::infinity();
    scan_.ban(token);
    if (!state_.greedy()) mass_ -= scan_.drop_mass(token, scale_);
  }

  std::span<float> logits_;
  const SamplingState& state_;
  std::int64_t position_;
  VocabScan scan_;
  float scale_ = 0;
  std::uint64_t mass_ = 0, least_mass_ = 0;
  std::vector<std::pair<std::int32_t, float>> rejected_;
};

}  // namespace

double random_number(const SamplingState& state, std::int64_t position, std::uint64_t number) {
  const SamplingConfig& config = state.config();
  return uniform(config.seed, static_cast<std::uint64_t>(config.first_position + position), number);
}

float inverse_temperature(const SamplingConfig& config) {
  return std::max(1.0f / config.temperature, std::numeric_limits<float>::min());
}

float reach_of(const SamplingConfig& config) {
  if (config.min_p <= 0) return kReach;
  return std::min(kReach, static_cast<float>(-natural_log(static_cast<double>(config.min_p))));
}

SampleResult sample(std::span<float> logits, const SamplingState& state, std::span<const std::int32_t> tokens,
                    std::int64_t position, SamplerScratch& scratch, TokenConstraint* constraint) {
  if (std::ssize(logits) != state.vocab_size()) {
    throw std::invalid_argument(std::to_string(logits.size()) + " logits for a vocabulary of " +
                                std::to_string(state.vocab_size()));
  }
  const FlushDenormals flush;
  if (constraint != nullptr && state.samples_from_all()) {
    const std::optional<std::int32_t> token =
        RejectionSampler(logits, state, position, scratch).first_allowed(*constraint);
    if (token) return report(*token, logits, state, scratch);
    return sample_allowed(logits, state, position, scratch, constraint->mask());
  }
  const TokenMask* mask = constraint == nullptr ? nullptr : &constraint->mask();
  const bool edits = state.edits_logits(), changes = mask != nullptr || edits;
  const bool yields = mask != nullptr && edits;
  if (changes) {
    if (reports(state) || yields) scratch.raw.assign(logits.begin(), logits.end());
    VocabScan(logits, scratch);  // a NaN must be found before a ban hides it
    if (mask != nullptr) mask->apply(logits);
    if (edits) state.process(logits, tokens, scratch.allowed);
    if (yields && VocabScan(logits, scratch).max_key() <= kLeastKey) {
      std::ranges::copy(scratch.raw, logits.begin());
      mask->apply(logits);
    }
  }
  return sample_processed(logits, changes ? std::span<const float>(scratch.raw) : logits, state, position, 0, scratch);
}

TokenLogprobs logprobs_of(std::span<const float> logits, std::int32_t token, std::int32_t top_n,
                          SamplerScratch& scratch) {
  const std::int64_t vocab_size = std::ssize(logits);
  if (token < 0 || token >= vocab_size || top_n < 0 || top_n > vocab_size) {
    throw std::invalid_argument("token " + std::to_string(token) + " and its " + std::to_string(top_n) +
                                " likeliest asked of a vocabulary of " + std::to_string(vocab_size));
  }
  const FlushDenormals flush;
  VocabScan scan(logits, scratch);
  if (scan.max_key() <= kLeastKey) throw_all_banned(logits.size());
  const double log_sum = natural_log(static_cast<double>(scan.weigh(1.0f)) / kMassOfOne);
  const auto logprob = [&](float logit) { return logprob_of(logit, scan.max(), log_sum); };
  TokenLogprobs result{.logprob = logprob(logits[token]), .rank = scan.rank(token), .top_ids = {}, .top_logprobs = {}};
  if (top_n == 0) return result;
  const auto top = scan.collect(scan.key_reached_by(top_n));
  std::partial_sort(top.begin(), top.begin() + top_n, top.end(), likelier);
  for (const Candidate& candidate : top.first(static_cast<std::size_t>(top_n))) {
    result.top_ids.push_back(token_of(candidate.key));
    result.top_logprobs.push_back(logprob(logit_of(candidate.key)));
  }
  return result;
}

}  // namespace quire
