#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace quire {

/// XXH64 of the bytes: a checksum that finds damage, not forgery, at the speed of memory.
/// https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md
std::uint64_t xxh64(std::span<const std::byte> bytes, std::uint64_t seed = 0);

}  // namespace quire
