#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "kv_cache/kv_file.h"
#include "kv_cache/kv_memory.h"
#include "kv_cache/prefix_key.h"
#include "kv_cache/sealed_pages.h"

namespace quire {

/// Records in a KvFile which pages the prefix cache holds, so that the next process finds them, at whatever instruction
/// this one dies. Not thread-safe: the step loop owns it.
///
/// The pages of the cache are sealed: their records have the key of the prefix before them, and a checksum. A page that
/// is written is never sealed: `seal` marks it after the last write, and `remove` unmarks it before the first. Pages in
/// a device's own memory end with the process, and have no checksums.
class PageLedger {
 public:
  static constexpr std::int32_t kNone = -1;  ///< parent of a first page

  /// The file and the memory of the pages must outlive the ledger. So must `log`, if there is one, to which each page
  /// is added that is sealed.
  PageLedger(KvFile& file, const KvMemory& memory, const PrefixKey& model, SealedPages* log = nullptr);

  const PrefixKey& model() const { return model_; }
  std::span<std::int32_t> tokens() const { return file_.tokens(); }  ///< [pages][block_size], written by the cache
  std::int32_t num_pages() const { return static_cast<std::int32_t>(file_.records().size()); }
  bool is_sealed(std::int32_t page) const { return record(page).state == PageRecord::kSealed; }
  std::int32_t parent(std::int32_t page) const { return record(page).parent; }
  std::uint64_t last_use(std::int32_t page) const { return record(page).last_use.load(std::memory_order_relaxed); }
  const PrefixKey& prefix(std::int32_t page) const { return record(page).prefix; }
  /// Key of the prefix that ends with the page.
  PrefixKey key(std::int32_t page) const { return extend_key(prefix(page), tokens_of(page)); }

  /// Adds a page that follows `parent` and whose tokens and tiles are written; the next call of `seal` seals it.
  /// `content`: checksum of its tiles, where that is known.
  void add(std::int32_t page, std::int32_t parent, const PrefixKey& prefix, std::optional<std::uint64_t> content);
  void seal();

  /// Removes a page, which may be written afterwards.
  void remove(std::int32_t page);

  /// Record that a sequence uses a page, and that no sequence does any more: the order in which pages are evicted.
  void use(std::int32_t page) { record(page).last_use.store(PageRecord::kInUse, std::memory_order_relaxed); }
  void release(std::int32_t page) { record(page).last_use.store(++clock_, std::memory_order_relaxed); }

  /// Returns the pages that an earlier process has sealed, each after its parent, without those whose checksum is wrong
  /// and those that follow them. All others are removed. No page was last used before one that follows it.
  std::vector<std::int32_t> take_over();

  std::int32_t num_taken_over() const { return num_taken_over_; }
  std::int32_t num_dropped() const { return num_dropped_; }  ///< sealed pages that `take_over` has removed

 private:
  PageRecord& record(std::int32_t page) const { return file_.records()[static_cast<std::size_t>(page)]; }
  std::span<const std::int32_t> tokens_of(std::int32_t page) const;
  struct Added {
    std::int32_t page;
    std::optional<std::uint64_t> content;
  };

  std::uint64_t checksum_of(std::int32_t page, std::uint64_t content) const;
  bool has_checksums() const { return memory_.device().in_host_memory(); }
  void log(std::int32_t page);
  std::vector<std::uint64_t> contents(std::span<const std::int32_t> pages);
  std::vector<std::int32_t> intact_pages();
  std::vector<std::int32_t> in_order(std::span<const std::int32_t> pages) const;

  KvFile& file_;
  const KvMemory& memory_;
  PrefixKey model_;
  SealedPages* log_;
  std::vector<Added> added_;  ///< pages added since the last call of `seal`
  std::uint64_t clock_ = 0;
  std::int32_t num_taken_over_ = 0, num_dropped_ = 0;
};

}  // namespace quire
