#include "sampling/device_sampling.h"

#include <algorithm>
#include <functional>
#include <stdexcept>
#include <utility>

#include "compute/denormals.h"
#include "sampling/logit_math.h"
#include "sampling/vocab_scan.h"

namespace quire {
namespace {

/// Drafts that a sampling state has counted, which it forgets at the end.
class SeenDrafts {
 public:
  explicit SeenDrafts(SamplingState& state) : state_(state) {}
  ~SeenDrafts() {
    for (const std::int32_t token : tokens_) state_.remove(token);
  }
  SeenDrafts(const SeenDrafts&) = delete;
  SeenDrafts& operator=(const SeenDrafts&) = delete;

  void add(std::int32_t token) {
    tokens_.push_back(token);
    state_.append(token);
  }

 private:
  SamplingState& state_;
  std::vector<std::int32_t> tokens_;
};

}  // namespace

void SampleRequests::clear() {
  edits_.clear();
  masks_.clear();
}

SampleRow SampleRequests::sample(const SamplingState& state, std::span<const std::int32_t> tokens,
                                 std::int64_t position, bool is_constrained, const TokenMask* mask, bool was_tried) {
  const SamplingConfig& config = state.config();
  SampleRow row{};
  row.top = config.logprobs.value_or(-1);
  const bool can_try = is_constrained && state.samples_from_all();
  row.tries = can_try && !was_tried ? kMostTries : 0;
  const bool is_masked = is_constrained && row.tries == 0;
  if (!can_report(row.top) || (is_masked && mask == nullptr)) return {};
  if (state.edits_logits() && !add_edits(state, tokens, row)) return {};
  if (is_masked) row.mask = add_mask(mask->words());
  row.kind = state.greedy() ? SampleRow::kLikeliest : SampleRow::kSample;
  if (state.greedy()) return row;
  const std::int32_t num_tried = can_try && was_tried ? kMostTries : 0;
  for (std::int32_t i = 0; i < std::max(row.tries, 1); i++)
    row.randoms[i] = random_number(state, position, static_cast<std::uint64_t>(num_tried + i));
  row.top_p = static_cast<double>(config.top_p);
  row.top_k = std::max(config.top_k, 0);
  row.inverse_temperature = inverse_temperature(config);
  row.reach = -reach_of(config);
  return row;
}

SampleRow SampleRequests::sample_masked(const SamplingTask& task, std::size_t row) {
  if (!can_report(task.sequence->sampling.config().logprobs.value_or(0))) return {};  // no mask need be written
  return sample_row(task, row, task.constraint == nullptr ? nullptr : &task.constraint->mask(), true);
}

SampleRow SampleRequests::report(std::int32_t token, std::int32_t top) const {
  SampleRow row{};
  row.top = top;
  row.token = token;
  row.kind = can_report(row.top) ? SampleRow::kReport : SampleRow::kNothing;
  return row;
}

void SampleRequests::add(const SamplingTask& task, std::span<SampleRow> rows) {
  SamplingState& state = task.sequence->sampling;
  const std::span<const std::int32_t> tokens(task.sequence->tokens);
  const auto drafts = tokens.subspan(static_cast<std::size_t>(task.position), rows.size() - 1);
  SeenDrafts seen(state);
  for (std::size_t i = 0; i < rows.size(); i++) {
    const TokenMask* mask = i == 0 ? task.mask : nullptr;  // that of a later row depends on the drafts before it
    rows[i] = task.samples
                  ? sample_row(task, i, mask)
                  : report(tokens[static_cast<std::size_t>(task.position)], state.config().prompt_logprobs.value_or(0));
    if (i < drafts.size()) seen.add(drafts[i]);
  }
}

/// Returns the request for a row of a task, whose drafts before it `sequence.sampling` has seen.
SampleRow SampleRequests::sample_row(const SamplingTask& task, std::size_t row, const TokenMask* mask, bool was_tried) {
  const Sequence& sequence = *task.sequence;
  const std::int64_t position = task.position + static_cast<std::int64_t>(row);
  const auto tokens = std::span<const std::int32_t>(sequence.tokens).first(static_cast<std::size_t>(position));
  return sample(sequence.sampling, tokens, position, task.constraint != nullptr, mask, was_tried);
}

/// Returns the number of the mask.
std::int32_t SampleRequests::add_mask(std::span<const std::uint32_t> words) {
  const std::size_t begin = masks_.size();
  masks_.insert(masks_.end(), words.begin(), words.begin() + std::min(words.size(), mask_words()));
  masks_.resize(begin + mask_words());
  return static_cast<std::int32_t>(masks_.size() / mask_words());
}

std::int32_t SampleRequests::add_mask(std::span<const std::int32_t> allowed) {
  masks_.resize(masks_.size() + mask_words());
  const auto words = std::span(masks_).last(mask_words());
  for (const std::int32_t token : allowed)
    words[static_cast<std::size_t>(token / kMaskBits)] |= std::uint32_t{1} << (token % kMaskBits);
  return static_cast<std::int32_t>(masks_.size() / mask_words());
}

/// Adds what `state.process` does. Returns false, and adds nothing, if there may be too many edits.
bool SampleRequests::add_edits(const SamplingState& state, std::span<const std::int32_t> tokens, SampleRow& row) {
  if (edits_.size() + state.most_edits() > static_cast<std::size_t>(edit_limit(vocab_size_))) return false;
  const FlushDenormals flush;
  const SamplingConfig& config = state.config();
  const std::size_t first = edits_.size();
  state.for_each_ban(tokens, [&](std::int32_t token) { edits_.push_back({token, 0}); });
  const std::size_t banned = edits_.size();
  for (const auto& [token, bias] : config.logit_bias) edits_.push_back({token, bias});
  const std::size_t biased = edits_.size();
  state.for_each_penalty([&](std::int32_t token, std::int32_t outputs) {
    if (outputs == 0) edits_.push_back({token, 0});
  });
  const std::size_t prompted = edits_.size();
  state.for_each_penalty([&](std::int32_t token, std::int32_t outputs) {
    if (outputs > 0) edits_.push_back({token, state.frequency_loss(outputs)});
  });
  row.edited = 1;
  row.first_edit = static_cast<std::int32_t>(first);
  row.banned = static_cast<std::int32_t>(banned - first);
  row.biased = static_cast<std::int32_t>(biased - banned);
  row.prompted = static_cast<std::int32_t>(prompted - biased);
  row.generated = static_cast<std::int32_t>(edits_.size() - prompted);
  row.repetition_penalty = config.repetition_penalty;
  row.presence_penalty = config.presence_penalty;
  if (!config.allowed_token_ids.empty()) row.limit = add_mask(config.allowed_token_ids);
  return true;
}

bool needs_mask(const SamplingTask& task) {
  return task.constraint != nullptr && !task.sequence->sampling.samples_from_all();
}

void find_mask(SamplingTask& task) {
  if (!needs_mask(task) || task.mask != nullptr || !task.constraint->wait_until({})) return;
  try {
    task.mask = &task.constraint->mask();
  } catch (const std::runtime_error&) {
  }
}

std::optional<std::int32_t> token_of(const SampleRow& asked, const SampledRow& row, TokenConstraint* constraint) {
  if (asked.tries == 0) return row.token;
  const auto tried = std::span(row.tried).first(static_cast<std::size_t>(row.num_tried));
  const auto allowed = std::ranges::find_if(tried, [&](std::int32_t token) { return constraint->allows(token); });
  return allowed == tried.end() ? std::nullopt : std::optional(*allowed);
}

void check_good(const SampledRow& row, std::int32_t vocab_size) {
  if (row.is_good != 0) return;
  if (row.token >= 0) throw_bad_logit(row.token, row.key);
  throw_all_banned(static_cast<std::size_t>(vocab_size));
}

SampleResult result_of(const SampleRow& asked, const SampledRow& row, std::int32_t token,
                       std::vector<LikelyToken> listed) {
  SampleResult result{.token = token, .logprobs = {}};
  if (asked.top >= 0) result.logprobs = logprobs_of(asked, row, std::move(listed));
  return result;
}

TokenLogprobs logprobs_of(const SampleRow& asked, const SampledRow& row, std::vector<LikelyToken> listed) {
  const FlushDenormals flush;
  const double log_sum = natural_log(static_cast<double>(row.mass) / kMassOfOne);
  const auto logprob = [&](std::int32_t key) { return logprob_of(key_value(key), key_value(row.most), log_sum); };
  TokenLogprobs result{.logprob = logprob(row.key), .rank = row.rank, .top_ids = {}, .top_logprobs = {}};
  const auto add = [&](std::int32_t token, std::int32_t key) {
    result.top_ids.push_back(token);
    result.top_logprobs.push_back(logprob(key));
  };
  if (asked.top <= kMostTop) {
    for (std::int32_t i = 0; i < asked.top; i++) add(row.top_tokens[i], row.top_keys[i]);
    return result;
  }
  std::ranges::stable_sort(listed, std::greater{}, &LikelyToken::key);
  for (const auto [token, key] : listed) add(token, key);
  return result;
}

}  // namespace quire
