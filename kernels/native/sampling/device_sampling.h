#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include "compute/abi.h"
#include "sampling/batch_sampler.h"
#include "sampling/sampler.h"

namespace quire {

/// Returns what a device is to sample at a position: nothing if `state` edits logits, or if more likeliest tokens are
/// reported than a SampledRow has.
SampleRow row_to_sample(const SamplingState& state, std::int64_t position);

/// Returns the same where the token of a prompt is reported.
SampleRow row_to_report(const SamplingState& state, std::int32_t token);

/// Writes what a device is to sample of the rows of a task: nothing under a constraint.
void ask_device(const SamplingTask& task, std::span<SampleRow> rows);

/// Returns what `sample` would have returned; `top_n`: config.logprobs.
SampleResult result_of(const SampledRow& row, std::optional<std::int32_t> top_n);

/// Returns what `logprobs_of` would have returned of the logits.
TokenLogprobs logprobs_of(const SampledRow& row, std::int32_t top_n);

}  // namespace quire
