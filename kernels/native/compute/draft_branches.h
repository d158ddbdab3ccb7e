#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "compute/step.h"
#include "compute/step_gather.h"
#include "kv_cache/kv_cache.h"

namespace quire {

/// A slot, and the number of its tokens that are computed.
using ComputedSlot = std::pair<std::int32_t, std::int64_t>;

/// The branches of a step: paths beside the drafts of sequences, each a sequence of its own while the step computes.
class DraftBranches {
 public:
  /// Opens the branches that there are pages for, each with the pages of its sequence up to the start, and of its own
  /// from there on; adds their rows after those of all sequences. Rows of lookahead tokens are noted in
  /// `lookahead_rows`.
  void open(const StepRows& rows, KvCache& kv_cache, StepGather& gather,
            std::map<std::int32_t, std::int32_t>& lookahead_rows);

  /// Keeps the branches along which more tokens have been sampled than along what a sequence has kept so far, and
  /// closes the others. The results of sequences are at the first indices, as those of branches are after them.
  void take(const StepRows& rows, KvCache& kv_cache, std::vector<std::int32_t>& first_rows,
            std::vector<ComputedSlot>& computed, StepResult& result);

  /// Closes the branches that are open.
  void close(Sequences& sequences);

  std::size_t size() const { return open_.size(); }

 private:
  struct OpenBranch {
    std::int32_t index;  ///< index of its sequence in the batch
    std::int32_t slot;
  };

  std::vector<OpenBranch> open_;
};

}  // namespace quire
