#pragma once

#include <array>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

namespace quire {

/// Pages of KV memory, numbered from 0, each with a reference count. Not thread-safe: the step loop owns it.
///
/// Free pages are kept as maximal runs, so that sequences get contiguous pages, which are faster to read. A run stores
/// its length at both ends (boundary tags), and runs are listed by size class, a power of two. So a run is found, split
/// and merged in constant time, and every operation is linear in the pages that it touches.
///
/// Pages are committed from 0 on, an extent at a time, when fewer than half of the committed pages would stay free.
/// That leaves sequences room to grow in runs, while a small load on a large pool touches little memory.
///
/// Invariant: free_pages() + held_pages() == total().
class PagePool {
 public:
  static constexpr std::int32_t kAll = std::numeric_limits<std::int32_t>::max();

  /// Throws std::invalid_argument unless both are at least 1.
  explicit PagePool(std::int32_t num_pages, std::int32_t extent = kAll);

  /// Appends `count` pages, each with one reference, to `pages`. Returns false and changes nothing if fewer are free.
  /// Pages that follow pages.back() are preferred, so a sequence that keeps its pages in one vector grows contiguously.
  bool allocate(std::int32_t count, std::vector<std::int32_t>& pages);

  /// Takes these pages, in ascending order, with one reference each, out of a pool of which nothing has been taken yet.
  void take_over(std::span<const std::int32_t> pages);

  void retain(std::int32_t page);   ///< adds a reference; throws std::logic_error if the page is free
  void release(std::int32_t page);  ///< drops one, the last frees it; throws as retain does

  /// Prefetches the state that `release` reads.
  void prefetch(std::int32_t page) const {
    __builtin_prefetch(&references_[page]);
    __builtin_prefetch(&runs_[page]);
  }

  std::int32_t references(std::int32_t page) const;
  std::span<const std::int32_t> references() const noexcept { return references_; }  ///< references to each page
  std::int32_t total() const noexcept { return static_cast<std::int32_t>(references_.size()); }
  std::int32_t free_pages() const noexcept { return free_; }
  std::int32_t held_pages() const noexcept { return total() - free_; }
  std::int32_t committed() const noexcept { return committed_; }  ///< only pages [0, committed()) have been handed out

 private:
  struct Run {
    std::int32_t length = 0;    ///< length of a free run, at both of its ends; 0 at every held page
    std::int32_t next = kNone;  ///< next run of the size class, at the first page of a free run
    std::int32_t previous = kNone;
  };
  static constexpr std::int32_t kNone = -1;

  void commit(std::int32_t count);
  void free_run(std::int32_t first, std::int32_t length);
  void add_run(std::int32_t first, std::int32_t length);
  void remove_run(std::int32_t first);
  std::int32_t longest_run() const;
  void take(std::int32_t run, std::int32_t first, std::int32_t count, std::vector<std::int32_t>& pages);
  void check_held(std::int32_t page, const char* operation) const;

  std::vector<std::int32_t> references_;
  std::vector<Run> runs_;
  std::array<std::int32_t, 32> lists_;  ///< first page of the first run of each size class
  std::uint32_t nonempty_ = 0;          ///< bit c: lists_[c] holds a run
  std::int32_t free_ = 0;
  std::int32_t extent_;
  std::int32_t committed_ = 0;
};

}  // namespace quire
