#pragma once

#include "compute/runner_config.h"
#include "compute/step.h"
#include "kv_cache/sequences.h"

namespace quire {

/// Throws std::invalid_argument, which names the first row that is wrong, for a step that cannot be computed.
void check_step(const StepRows& rows, const Sequences& sequences, const RunnerConfig& config);

}  // namespace quire
