#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "kv_cache/kv_memory.h"

namespace quire {

// Outside KV memory a page is its runs one after the other, KvMemory::page_bytes(). All functions throw
// std::invalid_argument for a page, an offset or a size that cannot be; those of files also std::system_error with the
// system's error, which is EIO where a file ends early. Checksums are of a page's tiles, as a ledger knows them.

/// Writes a page to an open file, from `offset` on. It may change meanwhile: the caller finds out by the ledger.
void write_page(const KvMemory& memory, std::int32_t page, int descriptor, std::int64_t offset);

/// Reads a page that nobody else uses from an open file. Returns its checksum.
std::uint64_t read_page(const KvMemory& memory, std::int32_t page, int descriptor, std::int64_t offset);

/// Copies a page that does not change meanwhile to `copy`. Returns its checksum.
std::uint64_t copy_page(const KvMemory& memory, std::int32_t page, std::span<std::byte> copy);

/// Fills a page that nobody else uses with a copy of one. Returns its checksum.
std::uint64_t fill_page(const KvMemory& memory, std::int32_t page, std::span<const std::byte> copy);

}  // namespace quire
