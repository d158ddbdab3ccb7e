#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace quire {

/// XXH3 (64 bits) of the bytes: finds damage, not forgery, at the speed of memory.
std::uint64_t checksum(std::span<const std::byte> bytes);

}  // namespace quire
