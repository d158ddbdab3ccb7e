#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "compute/thread_pool.h"
#include "kv_cache/kv_file.h"
#include "kv_cache/page_ledger.h"
#include "kv_cache/state_store.h"

namespace quire {

/// Records in a KvFile which records of state are snapshots of pages, so that the next process finds them, at whatever
/// instruction this one dies. Not thread-safe: the step loop owns it.
///
/// A snapshot is sealed after its last write, with a checksum that also covers the key of its page's prefix, and its
/// seal is removed before the first write of what takes its place.
class StateLedger {
 public:
  /// The file, the ledger of its pages, and the threads must outlive this one.
  StateLedger(KvFile& file, const PageLedger& pages, ThreadPool& threads, const StateShape& shape);

  std::byte* memory() const { return file_.states(); }  ///< the first record

  /// Adds the snapshot of a page, which is written; the next call of `seal`, after that of the page, seals it.
  void add(std::int32_t record, std::int32_t page);
  void seal();

  /// Removes a snapshot, whose record may be written afterwards.
  void remove(std::int32_t record);

  /// Returns the snapshots that an earlier process has sealed, and their pages, which the ledger of pages must have
  /// taken over: the least recently used ones first, without those whose checksum is wrong. All others are removed.
  std::vector<std::pair<std::int32_t, std::int32_t>> take_over();

 private:
  StateSeal& seal_of(std::int32_t record) const { return file_.seals()[static_cast<std::size_t>(record)]; }
  std::vector<std::uint64_t> checksums(const std::vector<std::pair<std::int32_t, std::int32_t>>& snapshots);

  KvFile& file_;
  const PageLedger& pages_;
  ThreadPool& threads_;
  StateShape shape_;
  std::vector<std::pair<std::int32_t, std::int32_t>> added_;  ///< records and pages since the last call of `seal`
};

}  // namespace quire
