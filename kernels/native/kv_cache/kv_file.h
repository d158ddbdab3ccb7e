#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "compute/file_mapping.h"
#include "kv_cache/page_record.h"
#include "kv_cache/state_store.h"

namespace quire {

/// KV memory in a file that outlives the engine, usually a memfd that its supervisor holds.
///
/// The file has a header, which kernels/kv_file.py writes, a record and the tokens of each page, the seal of each
/// record of state, from a huge page on the tiles of all pages, and from another one on the records of state. Tiles and
/// states may also lie in a device's memory, and take none of the file's. Memory that was never written is zero.
class KvFile {
 public:
  static constexpr std::size_t kHeaderBytes = 4096;

  /// The bytes of tiles and of states that lie in the file.
  struct Contents {
    std::size_t tile_bytes, state_bytes;
  };

  /// Resizes the file and maps it, on huge pages where the system grants them. Throws std::invalid_argument where that
  /// is impossible.
  KvFile(int fd, std::int32_t num_pages, std::int32_t block_size, std::int32_t num_records, const Contents& contents);

  std::span<PageRecord> records() const;
  std::span<std::int32_t> tokens() const;  ///< [pages][block_size]
  std::span<StateSeal> seals() const;      ///< [records of state]
  std::byte* tiles() const;
  std::byte* states() const;  ///< the first record of state

 private:
  std::size_t num_pages_, num_tokens_, num_records_, tile_bytes_;
  FileMapping mapping_;
};

}  // namespace quire
