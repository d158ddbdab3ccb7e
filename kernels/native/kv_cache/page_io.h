#pragma once

#include <cstdint>

#include "kv_cache/kv_memory.h"

namespace quire {

// A page is read from and written to an open file as its runs one after the other: KvMemory::page_bytes(), from
// `offset` on. Both functions throw std::system_error with the system's error, which is EIO where a file ends early,
// and std::invalid_argument for a page or an offset that cannot be.

/// Writes a page, which may change meanwhile: the caller finds out by the ledger.
void write_page(const KvMemory& memory, std::int32_t page, int descriptor, std::int64_t offset);

/// Reads a page that nobody else uses. Returns the checksum of its tiles, as a ledger knows it.
std::uint64_t read_page(const KvMemory& memory, std::int32_t page, int descriptor, std::int64_t offset);

}  // namespace quire
