#include "sampling/device_sampling.h"

#include <algorithm>

#include "compute/denormals.h"
#include "sampling/logit_math.h"

namespace quire {
SampleRow row_to_sample(const SamplingState& state, std::int64_t position) {
  const SamplingConfig& config = state.config();
  SampleRow row{};
  row.top = config.logprobs.value_or(-1);
  if (state.edits_logits() || row.top > kMostTop) return row;
  row.kind = state.greedy() ? SampleRow::kLikeliest : SampleRow::kSample;
  if (state.greedy()) return row;
  row.random = random_number(state, position, 0);
  row.top_p = static_cast<double>(config.top_p);
  row.top_k = std::max(config.top_k, 0);
  row.inverse_temperature = inverse_temperature(config);
  row.reach = -reach_of(config);
  return row;
}

SampleRow row_to_report(const SamplingState& state, std::int32_t token) {
  SampleRow row{};
  row.top = state.config().prompt_logprobs.value_or(0);
  row.token = token;
  row.kind = row.top > kMostTop ? SampleRow::kNothing : SampleRow::kReport;
  return row;
}

void ask_device(const SamplingTask& task, std::span<SampleRow> rows) {
  const Sequence& sequence = *task.sequence;
  const auto position = static_cast<std::size_t>(task.position);
  std::ranges::fill(rows, SampleRow{});
  if (!task.samples) {
    rows.front() = row_to_report(sequence.sampling, sequence.tokens[position]);
  } else if (task.constraint == nullptr) {
    for (std::size_t i = 0; i < rows.size(); i++)
      rows[i] = row_to_sample(sequence.sampling, static_cast<std::int64_t>(position + i));
  }
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
