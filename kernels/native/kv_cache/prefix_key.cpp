#include "kv_cache/prefix_key.h"

#include <llvm/Support/BLAKE3.h>

#include <array>

namespace quire {
namespace {

PrefixKey hash_of(const PrefixKey& first, llvm::ArrayRef<std::uint8_t> second) {
  llvm::BLAKE3 hasher;
  hasher.update(first);
  hasher.update(second);
  return hasher.final();
}

llvm::ArrayRef<std::uint8_t> bytes_of(const void* data, std::size_t size) {
  return {static_cast<const std::uint8_t*>(data), size};
}

}  // namespace

PrefixKey model_key(std::string_view name) { return llvm::BLAKE3::hash(bytes_of(name.data(), name.size())); }

PrefixKey root_key(const PrefixKey& model, std::string_view salt) {
  return hash_of(model, bytes_of(salt.data(), salt.size()));
}

PrefixKey extend_key(const PrefixKey& prefix, std::span<const std::int32_t> tokens) {
  return hash_of(prefix, bytes_of(tokens.data(), tokens.size_bytes()));
}

PrefixKey state_key(const PrefixKey& prefix, std::int32_t piece) {
  // Of another length than a page's tokens, which are a multiple of 32: no tokens have this key.
  const std::array<std::int32_t, 3> parts{-1, -1, piece};
  return hash_of(prefix, bytes_of(parts.data(), sizeof parts));
}

}  // namespace quire
