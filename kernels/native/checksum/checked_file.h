#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "compute/device.h"

namespace quire {

// Parts of files are read to a device's memory, and written from it, by all threads, in blocks that are hashed while
// they are in the CPU's cache. The checksum is that of the blocks' checksums. Both functions throw std::system_error
// with the system's error, and `read_part` also where the file ends early.

inline constexpr std::size_t kChecksumBlock = std::size_t{1} << 20;  ///< bytes of a block

/// Reads memory.size() bytes of an open file, from `offset` on. Returns their checksum.
std::uint64_t read_part(const Device& device, int descriptor, std::uint64_t offset, std::span<std::byte> memory);

/// Writes the memory to an open file, from `offset` on. Returns the checksum of the bytes.
std::uint64_t write_part(const Device& device, int descriptor, std::uint64_t offset, std::span<std::byte> memory);

}  // namespace quire
