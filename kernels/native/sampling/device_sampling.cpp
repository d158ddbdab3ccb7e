#include "sampling/device_sampling.h"

#include <algorithm>
#include <memory>
#include <stdexcept>

#include "compute/denormals.h"
#include "sampling/logit_math.h"

namespace quire {
namespace {

constexpr std::size_t kBits = 32;  // of a word of a mask

}  // namespace

void SampleRequests::clear() {
  edits_.clear();
  masks_.clear();
}

SampleRow SampleRequests::sample(const SamplingState& state, std::span<const std::int32_t> tokens,
                                 std::int64_t position, std::span<const std::uint32_t> mask) {
  const SamplingConfig& config = state.config();
  SampleRow row{};
  row.top = config.logprobs.value_or(-1);
  if (row.top > kMostTop || (state.edits_logits() && !add_edits(state, tokens, row))) return {};
  if (!mask.empty()) row.mask = add_mask(mask);
  row.kind = state.greedy() ? SampleRow::kLikeliest : SampleRow::kSample;
  if (state.greedy()) return row;
  row.tries = !mask.empty() && state.samples_from_all() ? kMostTries : 0;
  for (std::int32_t i = 0; i <= row.tries; i++)
    row.randoms[i] = random_number(state, position, static_cast<std::uint64_t>(i));
  row.top_p = static_cast<double>(config.top_p);
  row.top_k = std::max(config.top_k, 0);
  row.inverse_temperature = inverse_temperature(config);
  row.reach = -reach_of(config);
  return row;
}

SampleRow SampleRequests::report(const SamplingState& state, std::int32_t token) const {
  SampleRow row{};
  row.top = state.config().prompt_logprobs.value_or(0);
  row.token = token;
  row.kind = row.top > kMostTop ? SampleRow::kNothing : SampleRow::kReport;
  return row;
}

void SampleRequests::add(const SamplingTask& task, std::span<SampleRow> rows) {
  Sequence& sequence = *task.sequence;
  const std::span<const std::int32_t> tokens(sequence.tokens);
  const auto position = static_cast<std::size_t>(task.position);
  std::ranges::fill(rows, SampleRow{});
  if (!task.samples) {
    rows.front() = report(sequence.sampling, tokens[position]);
    return;
  }
  const auto drafts = tokens.subspan(position, rows.size() - 1);
  const std::size_t end = task.constraint == nullptr ? rows.size() : task.masks.size();
  for (std::size_t i = 0; i < end; i++) {
    const auto before = tokens.first(position + i);
    const auto mask = task.constraint == nullptr ? std::span<const std::uint32_t>() : task.masks[i];
    rows[i] = sample(sequence.sampling, before, std::ssize(before), mask);
    if (i < drafts.size()) sequence.sampling.append(drafts[i]);  // which the next row has seen
  }
  for (const std::int32_t token : drafts.first(std::min(end, drafts.size()))) sequence.sampling.remove(token);
  if (std::ranges::any_of(rows.first(end), [](const SampleRow& row) { return row.kind == SampleRow::kNothing; }))
    std::ranges::fill(rows, SampleRow{});
}

void write_masks(SamplingTask& task) {
  if (task.constraint == nullptr || task.num_given > 0 || !task.constraint->wait_until({})) return;
  const auto add = [&](TokenConstraint& constraint) -> const TokenMask& {
    const TokenMask& mask = constraint.mask();
    task.masks.emplace_back(mask.words().begin(), mask.words().end());
    return mask;
  };
  try {
    const TokenMask* mask = &add(*task.constraint);
    if (task.num_rows == 1) return;
    const std::unique_ptr<TokenConstraint> ahead = task.constraint->copy();
    for (std::int32_t i = 0; i + 1 < task.num_rows; i++) {
      const std::int32_t draft = task.sequence->tokens[static_cast<std::size_t>(task.position + i)];
      if (!mask->has(draft)) return;
      ahead->follow(draft);
      if (ahead->has_ended()) return;
      mask = &add(*ahead);
    }
  } catch (const std::runtime_error&) {
    task.masks.clear();  // the host meets the same error when it samples
  }
}

/// Returns the number of the mask.
std::int32_t SampleRequests::add_mask(std::span<const std::uint32_t> words) {
  const std::size_t begin = masks_.size();
  masks_.insert(masks_.end(), words.begin(), words.begin() + std::min(words.size(), mask_words_));
  masks_.resize(begin + mask_words_);
  return static_cast<std::int32_t>(masks_.size() / mask_words_);
}

std::int32_t SampleRequests::add_mask(std::span<const std::int32_t> allowed) {
  masks_.resize(masks_.size() + mask_words_);
  const auto words = std::span(masks_).last(mask_words_);
  for (const std::int32_t token : allowed)
    words[static_cast<std::size_t>(token) / kBits] |= std::uint32_t{1} << (static_cast<std::size_t>(token) % kBits);
  return static_cast<std::int32_t>(masks_.size() / mask_words_);
}

/// Adds what `state.process` does. Returns false, and adds nothing, if there are too many edits.
bool SampleRequests::add_edits(const SamplingState& state, std::span<const std::int32_t> tokens, SampleRow& row) {
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
  if (edits_.size() > kMostEdits) {
    edits_.resize(first);
    return false;
  }
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

SampleResult result_of(const SampledRow& row, std::optional<std::int32_t> top_n) {
  SampleResult result{.token = row.token, .logprobs = {}};
  if (top_n) result.logprobs = logprobs_of(row, *top_n);
  return result;
}

TokenLogprobs logprobs_of(const SampledRow& row, std::int32_t top_n) {
  const FlushDenormals flush;
  const double log_sum = natural_log(static_cast<double>(row.mass) / kMassOfOne);
  const auto logprob = [&](std::int32_t key) { return logprob_of(key_value(key), key_value(row.most), log_sum); };
  TokenLogprobs result{.logprob = logprob(row.key), .rank = row.rank, .top_ids = {}, .top_logprobs = {}};
  for (std::int32_t i = 0; i < top_n; i++) {
    result.top_ids.push_back(row.top_tokens[i]);
    result.top_logprobs.push_back(logprob(row.top_keys[i]));
  }
  return result;
}

}  // namespace quire
