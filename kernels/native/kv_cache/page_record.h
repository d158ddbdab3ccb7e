#pragma once

#include <atomic>
#include <cstdint>
#include <limits>

#include "kv_cache/prefix_key.h"

namespace quire {

/// Record of a page in a KvFile, besides its tokens and tiles. Zeros are an empty record.
struct alignas(64) PageRecord {
  enum State : std::uint32_t {
    kEmpty,   ///< the page may be written
    kFull,    ///< the page is in the prefix cache, must not be written, and lacks its checksum
    kSealed,  ///< the page has its checksum too: a new process may take it over
  };

  static constexpr std::uint64_t kInUse = std::numeric_limits<std::uint64_t>::max();

  std::atomic<std::uint32_t> state;
  std::int32_t parent;                  ///< the page before it, or PageLedger::kNone
  std::atomic<std::uint64_t> last_use;  ///< time of a clock that counts releases of pages; kInUse: a sequence holds it
  std::uint64_t checksum;               ///< checksum of the page's tiles, its tokens, `parent` and `prefix`
  PrefixKey prefix;                     ///< key of the prefix before the page
};

/// Seal of a record of state in a KvFile. Zeros are none.
struct alignas(16) StateSeal {
  std::atomic<std::int32_t> page;  ///< 1 + the page whose snapshot it is, once it is written; 0: it may be written
  std::uint64_t checksum;
};
static_assert(sizeof(PageRecord) == 64 && std::atomic<std::uint64_t>::is_always_lock_free);

}  // namespace quire
