#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "compute/abi.h"
#include "compute/arena.h"
#include "compute/plan.h"
#include "compute/thread_pool.h"
#include "grammar/token_rule.h"
#include "kv_cache/kv_memory.h"
#include "kv_cache/sequences.h"
#include "sampling/draws.h"
#include "sampling/sampler.h"

namespace quire {

inline constexpr std::int32_t kDrawnLater = -2;  ///< in place of a token that is still being drawn

struct RunnerConfig {
  std::int32_t threads;
  bool pin;  ///< every thread to a CPU of its own
  std::int32_t num_pages;
  std::int32_t page_size;
  std::int32_t vocab_size;
  std::int64_t kv_heads;
  std::int64_t max_num_batched_tokens;
  std::int64_t max_logit_rows;    ///< logit rows computed at once; a step may have more, in turns
  std::int64_t logit_stride;      ///< floats from one row of logits to the next
  std::int64_t hidden_size;       ///< floats of a hidden state
  std::int64_t tokens_per_entry;  ///< tokens of an attention entry at most
  std::int64_t layers;            ///< that have KV
  std::int64_t tile_bytes;        ///< of a KV tile of one head (emit/kv.py)
  std::int64_t value_offset;      ///< where V begins in it, in bytes
};

/// Log probabilities at one position, with the token that stands there.
struct Position {
  std::int32_t token;
  TokenLogprobs logprobs;
};

/// What a step gave, by index in the batch.
struct StepResult {
  std::vector<std::int32_t> token_ids;  ///< -1 where none was drawn, kDrawnLater where `settle` is going to tell
  std::vector<std::optional<TokenLogprobs>> logprobs;
  std::map<std::int32_t, std::vector<Position>> prompt_logprobs;  ///< of the prompt tokens after those computed
  std::map<std::int32_t, std::string> errors;                     ///< why no token could be drawn
  std::map<std::int32_t, std::vector<float>> pooled;  ///< of the sequences that are pooled and computed to their end
};

/// Runs a model: owns its memory, threads, sequences and plan.
class Runner {
 public:
  explicit Runner(const RunnerConfig& config);

  Arena& arena() { return arena_; }
  ThreadPool& threads() { return threads_; }
  Sequences& sequences() { return sequences_; }
  const StepInputs& inputs() const { return inputs_; }

  /// Zeroed memory for a matrix whose columns lie one after the other. Where threads run on several nodes, those of
  /// each touch first, and so have near them, what `Plan` prefers to give them.
  void* allocate_by_node(std::size_t bytes);
  const KvMemory& kv() const { return kv_; }
  Plan& body() { return body_; }      ///< from token ids to the hidden state
  Plan& head() { return head_; }      ///< from the hidden state to logits, for `logit_rows`
  Plan& states() { return states_; }  ///< from the hidden state to that which the head reads, as f32 rows

  /// Moves attention entries of a step to parts and splits, where that gives all threads work; `dims` count them.
  void split_attention(Dims& dims);

  /// Computes tokens [start, start + count) of each slot's sequence, KV included. Where that reaches the sequence's
  /// end, draws one token and appends it, or gives the pooled vector. Pages that are full now are shared. Throws
  /// std::invalid_argument when the batch can't be; nothing has changed then.
  ///
  /// Those that have rules draw last, while the caller goes on with the others until it calls `settle`: their token is
  /// kDrawnLater so far. The rules follow what is drawn. One that is late is waited for a little while, where others
  /// have drawn: its sequence draws nothing then, and its last token is to be computed again.
  StepResult step(std::span<const std::int32_t> slots, std::span<const std::int64_t> starts,
                  std::span<const std::int64_t> counts);

  /// Adds to the result of the last step what was to be drawn later, and tells whose: that of the next ones in the
  /// batch, as many as have drawn, but at least one, which is waited for. When all have been told it tells of none, and
  /// nobody draws any more. Throws std::invalid_argument for the result of another step; if it throws anything else,
  /// those that it has not told of draw nothing.
  std::vector<std::int32_t> settle(StepResult& result);

  /// Sequences::fork, with what stands in the page where the two sequences part: both write to that page next, so
  /// copy-on-write may as well copy at once.
  bool fork(std::int32_t slot, std::int32_t source, std::int64_t num_computed, std::int64_t num_tokens);

 private:
  struct StateRow {
    std::int32_t index;  ///< in the batch
    std::int32_t row;    ///< in the step's tokens
  };

  void check(std::span<const std::int32_t> slots, std::span<const std::int64_t> starts,
             std::span<const std::int64_t> counts);
  void gather(std::int32_t index, std::int32_t slot, std::int64_t start, std::int64_t count, Dims& dims);
  void clear_values(const Sequence& sequence, std::int64_t start, std::int64_t end);
  void pool_states(std::span<const std::int32_t> slots, Dims& dims, StepResult& result);
  void pool_state(std::int32_t index, Sequence& sequence, std::span<const float> state, StepResult& result);
  void compute_logits(std::span<LogitRow> rows, Dims& dims);
  void draw(TokenRule::Clock::time_point begun, Dims& dims, StepResult& result);
  const LogitRow& take_next(std::size_t end, StepResult& result);
  void take(const LogitRow& row, Drawn& drawn, StepResult& result);

  RunnerConfig config_;
  Arena arena_;
  ThreadPool threads_;
  KvMemory kv_;
  Sequences sequences_;
  StepInputs inputs_;
  Plan body_, head_, states_;
  std::size_t num_sequences_ = 0;  ///< of the last step
  std::vector<LogitRow> rows_;
  std::vector<StateRow> state_rows_;
  Draws draws_;
};

}  // namespace quire
