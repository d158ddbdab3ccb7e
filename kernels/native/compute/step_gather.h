#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "compute/abi.h"
#include "compute/device.h"
#include "compute/runner_config.h"
#include "kv_cache/kv_cache.h"
#include "sampling/batch_sampler.h"

namespace quire {

inline std::int64_t& dim(Dims& dims, Dim name) { return dims[static_cast<std::size_t>(name)]; }

/// A token of a step whose hidden state is pooled.
struct StateRow {
  std::int32_t index;  ///< index of its sequence in the batch
  std::int32_t row;    ///< row of the token, among the step's tokens
};

/// Writes the rows of a step to its inputs, and notes what is to be done with their results.
class StepGather {
 public:
  StepGather(const RunnerConfig& config, const StepInputs& inputs, Device& device);

  /// Begins a step over the sequences of `kv_cache`.
  void begin(KvCache& kv_cache);

  /// Adds tokens [start, start + count) of a sequence, the last `num_drafts` of which are drafts, as number `index`.
  void add(std::int32_t index, std::int32_t slot, std::int64_t start, std::int64_t count, std::int64_t num_drafts);

  /// Begins to write the states of all sequences that were added, once all are there: branches fork the states before.
  void write_states();

  /// Ends the step of a sequence for which it has failed, unless it has ended: its state goes back to where it was, or
  /// to a snapshot. `index` as in `add`.
  void take_back_state(std::int32_t index);
  void take_back_states();

  /// Makes the last row that of its sequence's lookahead token, of which nothing is sampled; returns the row.
  std::int32_t make_lookahead();

  /// See Runner.
  void split_attention(Dims& dims) const;

  Dims& dims() { return dims_; }
  std::vector<SamplingTask>& tasks() { return tasks_; }
  std::span<const StateRow> state_rows() const { return state_rows_; }

  /// The first row of each sequence among the step's tokens, by index in the batch.
  std::vector<std::int32_t>& first_rows() { return first_rows_; }

 private:
  /// Tokens of a sequence in the step; those from number `certain` on may be taken back.
  struct Piece {
    std::int32_t slot;
    std::int64_t row, start, count, certain;
  };

  const RunnerConfig& config_;
  const StepInputs& inputs_;
  Device& device_;
  std::int64_t kv_heads_;  ///< of the layer that has the fewest
  KvCache* kv_cache_ = nullptr;
  Dims dims_{};
  std::vector<SamplingTask> tasks_;
  std::vector<StateRow> state_rows_;
  std::vector<std::int32_t> first_rows_;
  std::vector<Piece> pieces_;
};

}  // namespace quire
