#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "kv_cache/kv_memory.h"
#include "kv_cache/state_store.h"

namespace quire {

struct RunnerConfig {
  std::int32_t num_pages;
  std::int32_t block_size;
  std::int32_t vocab_size;
  std::int64_t max_num_batched_tokens;
  std::int64_t max_logit_rows;          ///< logit rows computed at once; a step may have more, in turns
  std::int64_t logit_stride;            ///< floats from one row of logits to the next; 0: the model has none
  std::int64_t hidden_size;             ///< floats of a hidden state
  std::int64_t tokens_per_entry;        ///< most tokens of an attention entry
  std::vector<KvLayerShape> kv_layers;  ///< the layers that have KV
  std::optional<StateShape> state;      ///< of layers that keep a state in place of KV
  std::int64_t window;                  ///< longest attention window of the layers, in tokens; 0: some layer has none
  bool bidirectional;                   ///< every token attends to all (an encoder), so a sequence is computed at once
  bool samples_on_device;               ///< the plan of the logits samples too, as SampleRow says
  bool lookahead;                       ///< the embedding has a row for the number vocab_size, the lookahead token's

  /// The file of KV memory that outlives the runner (KvFile), and the name of all that the bits of its KV depend on
  /// besides tokens. Without a file KV memory ends with the runner.
  std::optional<std::int32_t> kv_memory_fd;
  std::string kv_model;
  std::int32_t sealed_queues;  ///< queues of the sealed pages of the file, each for a thread that copies them elsewhere
};

/// Returns the config. Throws std::invalid_argument that names the field that is out of range.
const RunnerConfig& checked(const RunnerConfig& config);

}  // namespace quire
