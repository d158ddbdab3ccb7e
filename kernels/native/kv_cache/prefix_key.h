#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string_view>

namespace quire {

/// The key of a prefix: a BLAKE3 hash of the model, the salt and all tokens. Pages with equal keys have equal KV, also
/// in another process, and no tenant can make tokens whose key is that of another salt.
using PrefixKey = std::array<std::uint8_t, 32>;

/// Returns the key of a model. The name states all that the bits of its KV depend on, besides tokens.
PrefixKey model_key(std::string_view name);

/// Returns the key of the empty prefix under a salt.
PrefixKey root_key(const PrefixKey& model, std::string_view salt);

/// Returns the key of a prefix that `tokens` extend.
PrefixKey extend_key(const PrefixKey& prefix, std::span<const std::int32_t> tokens);

/// Returns the key of a piece of the state after a prefix.
PrefixKey state_key(const PrefixKey& prefix, std::int32_t piece);

}  // namespace quire
