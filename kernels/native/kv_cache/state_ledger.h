#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "kv_cache/kv_file.h"
#include "kv_cache/page_ledger.h"
#include "kv_cache/state_store.h"

namespace quire {

/// Records in a KvFile which records of state are snapshots of pages, so that the next process finds them, at whatever
/// instruction this one dies. Not thread-safe: the step loop owns it.
///
/// A snapshot is sealed after its last write, with a checksum that also covers the key of its page's prefix, and its
/// seal is removed before the first write of what takes its place. Those in a device's own memory have no checksums.
class StateLedger {
 public:
  /// The file, the ledger of its pages, and the device of the records must outlive this one. So must `log`, if there is
  /// one, to which the pieces of snapshots are added that are sealed and to be copied, as pages with numbers after
  /// those of the pages.
  StateLedger(KvFile& file, const PageLedger& pages, const StateMemory& memory, const StateShape& shape,
              SealedPages* log = nullptr);

  /// Adds the snapshot of a page, which is written; the next call of `seal`, after that of the page, seals it.
  /// `is_logged`: it is to be copied.
  void add(std::int32_t record, std::int32_t page, bool is_logged);
  void seal();

  /// Lets a snapshot that was added be copied.
  void log(std::int32_t record);

  /// Removes a snapshot, whose record may be written afterwards.
  void remove(std::int32_t record);

  /// Returns the snapshots that an earlier process has sealed, and their pages, which the ledger of pages must have
  /// taken over: the least recently used ones first, without those whose checksum is wrong. All others are removed.
  std::vector<std::pair<std::int32_t, std::int32_t>> take_over();

 private:
  struct Added {
    std::int32_t record, page;
    bool is_logged;
  };

  StateSeal& seal_of(std::int32_t record) const { return file_.seals()[static_cast<std::size_t>(record)]; }
  std::vector<std::uint64_t> checksums(std::span<const Added> snapshots);
  void log_pieces(std::int32_t record, std::int32_t page);
  std::int32_t first_piece(std::int32_t record) const { return pages_.num_pages() + record * shape_.num_pieces(); }

  KvFile& file_;
  const PageLedger& pages_;
  StateMemory memory_;
  StateShape shape_;
  SealedPages* log_;
  std::vector<Added> added_;  ///< since the last call of `seal`
};

}  // namespace quire
