#include "compute/runner_config.h"

#include <algorithm>
#include <iterator>
#include <stdexcept>
#include <string>

#include "compute/abi.h"

namespace quire {

const RunnerConfig& checked(const RunnerConfig& config) {
  constexpr std::int64_t kMost = std::int64_t{1} << 31, kMostBytes = std::int64_t{1} << 48, kMostQueues = 16;
  const auto require = [](const char* name, std::int64_t given, std::int64_t least, std::int64_t most) {
    if (given < least || given > most)
      throw std::invalid_argument(std::string(name) + "=" + std::to_string(given) + "; it must be from " +
                                  std::to_string(least) + " to " + std::to_string(most));
  };
  require("num_pages", config.num_pages, 1, kMost);
  require("block_size", config.block_size, kTileTokens, kMost);
  require("block_size modulo tokens of a tile", config.block_size % kTileTokens, 0, 0);
  require("vocab_size", config.vocab_size, 1, kMost);
  require("max_num_batched_tokens", config.max_num_batched_tokens, 1, kMost);
  require("max_logit_rows", config.max_logit_rows, 1, kMost);
  if (config.logit_stride != 0) require("logit_stride", config.logit_stride, config.vocab_size, kMost);
  require("hidden_size", config.hidden_size, 0, kMost);
  require("tokens_per_entry", config.tokens_per_entry, 1, kMost);
  require("window", config.window, 0, kMost);
  require("sealed_queues", config.sealed_queues, 0, kMostQueues);
  require("number of kv_layers", std::ssize(config.kv_layers), 1, kMost);
  const std::int64_t tiles = std::int64_t{config.num_pages} * (config.block_size / kTileTokens);
  std::int64_t left = kMostBytes / tiles;  // bytes of a tile in the layers that follow
  for (const KvLayerShape& layer : config.kv_layers) {
    require("tile_bytes", layer.tile_bytes, 1, std::min(kMost, left));
    require("value_offset", layer.value_offset, 0, layer.tile_bytes);
    require("kv_heads", layer.heads, 1, left / layer.tile_bytes);
    left -= layer.heads * layer.tile_bytes;
  }
  return config;
}

}  // namespace quire
