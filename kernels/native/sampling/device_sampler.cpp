#include "sampling/device_sampler.h"

#include <stdexcept>

namespace quire {

void DeviceSampler::ask(std::span<SamplingTask> tasks) {
  requests_.clear();
  std::size_t first = 0;
  for (SamplingTask& task : tasks) {
    const auto num_rows = static_cast<std::size_t>(task.num_rows);
    const std::span<SampleRow> rows(inputs_.sample_rows + first, num_rows);
    find_mask(task);  // it may be written by now
    requests_.add(task, rows);
    for (SampleRow& row : rows) row.row = static_cast<std::int32_t>(&row - inputs_.sample_rows);
    task.asked = rows;
    task.sampled = {inputs_.sampled_rows + first, num_rows};
    first += num_rows;
  }
  write(requests_);
}

std::optional<SampleResult> DeviceSampler::sampled(const SamplingTask& task, std::size_t row) {
  const SampleRow& asked = task.asked[row];
  const SampledRow& sampled = task.sampled[row];
  std::optional<std::int32_t> token;
  if (asked.kind != SampleRow::kNothing) {
    check_good(sampled, requests_.vocab_size());
    token = token_of(asked, sampled, task.constraint);
    if (token && (*token == sampled.token || asked.top < 0)) return result_of(asked, sampled, *token, listed(asked));
  }
  SampleRequests requests(requests_.vocab_size());
  SampleRow again = token ? requests.report(*token, asked.top) : requests.sample_masked(task, row);
  if (again.kind == SampleRow::kNothing) return std::nullopt;
  again.row = asked.row;
  const SampledRow other = sample_again(requests, again);
  check_good(other, requests_.vocab_size());
  return result_of(again, other, other.token, listed(again));
}

std::optional<TokenLogprobs> DeviceSampler::reported(const SamplingTask& task) const {
  const SampleRow& asked = task.asked.front();
  const SampledRow& sampled = task.sampled.front();
  if (asked.kind == SampleRow::kNothing) return std::nullopt;
  check_good(sampled, requests_.vocab_size());
  return logprobs_of(asked, sampled, listed(asked));
}

/// Returns the likeliest tokens of a row that has been sampled, if they are more than a SampledRow has.
std::vector<LikelyToken> DeviceSampler::listed(const SampleRow& row) const {
  if (row.top <= kMostTop) return {};
  std::vector<LikelyToken> tokens(static_cast<std::size_t>(row.top));
  device_.read(std::as_writable_bytes(std::span(tokens)),
               reinterpret_cast<std::byte*>(inputs_.changed_logits + row.row * logit_stride_));
  return tokens;
}

SampledRow DeviceSampler::sample_again(const SampleRequests& requests, const SampleRow& row) {
  if (plan_.launches().size() != 1) throw std::logic_error("a row is sampled once more by one launch");
  const std::lock_guard lock(mutex_);
  inputs_.sample_rows[once_more_] = row;
  write(requests);
  Dims dims{};
  dims[static_cast<std::size_t>(Dim::logit_rows)] = 1;
  device_.run(plan_, dims);
  return inputs_.sampled_rows[once_more_];
}

/// Writes edits and masks.
void DeviceSampler::write(const SampleRequests& requests) const {
  const auto copy = [&](void* to, std::span<const std::byte> bytes) {
    if (!bytes.empty()) device_.write(static_cast<std::byte*>(to), bytes);
  };
  copy(inputs_.logit_edits, std::as_bytes(requests.edits()));
  copy(inputs_.token_masks, std::as_bytes(requests.masks()));
}

}  // namespace quire
