#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "kv_cache/kv_memory.h"

namespace quire {

// A copy of a page is its runs one after the other, KvMemory::page_bytes(). The checksum is that of a page's tiles, as
// a ledger knows it. Both functions throw std::invalid_argument for a page or a size that cannot be.

/// Copies a page. Returns the checksum of the copy.
std::uint64_t copy_page(const KvMemory& memory, std::int32_t page, std::span<std::byte> copy);

/// Fills a page that nobody else uses with a copy of one. Returns its checksum.
std::uint64_t fill_page(const KvMemory& memory, std::int32_t page, std::span<const std::byte> copy);

}  // namespace quire
