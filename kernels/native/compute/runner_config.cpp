#include "compute/runner_config.h"

#include <stdexcept>
#include <string>

#include "compute/abi.h"

namespace quire {

const RunnerConfig& checked(const RunnerConfig& config) {
  constexpr std::int64_t kMost = std::int64_t{1} << 31, kMostBytes = std::int64_t{1} << 48;
  const auto require = [](const char* name, std::int64_t given, std::int64_t least, std::int64_t most) {
    if (given < least || given > most)
      throw std::invalid_argument(std::string(name) + "=" + std::to_string(given) + "; it must be from " +
                                  std::to_string(least) + " to " + std::to_string(most));
  };
  require("num_pages", config.num_pages, 1, kMost);
  require("block_size", config.block_size, kTileTokens, kMost);
  require("block_size modulo tokens of a tile", config.block_size % kTileTokens, 0, 0);
  require("vocab_size", config.vocab_size, 1, kMost);
  require("kv_heads", config.kv_heads, 1, kMost);
  require("max_num_batched_tokens", config.max_num_batched_tokens, 1, kMost);
  require("max_logit_rows", config.max_logit_rows, 1, kMost);
  if (config.logit_stride != 0) require("logit_stride", config.logit_stride, config.vocab_size, kMost);
  require("hidden_size", config.hidden_size, 0, kMost);
  require("tokens_per_entry", config.tokens_per_entry, 1, kMost);
  require("layers", config.layers, 1, kMost);
  require("tile_bytes", config.tile_bytes, 1, kMost);
  require("value_offset", config.value_offset, 0, config.tile_bytes);
  require("window", config.window, 0, kMost);
  const std::int64_t tiles = std::int64_t{config.num_pages} * (config.block_size / kTileTokens);
  require("bytes of KV of a layer's head", config.tile_bytes, 1, kMostBytes / tiles);
  require("layers times kv_heads", config.layers * config.kv_heads, 1, kMostBytes / (tiles * config.tile_bytes));
  return config;
}

}  // namespace quire
