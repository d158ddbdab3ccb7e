#pragma once

#include <array>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

namespace quire {

/// Pages of KV memory, numbered from 0, with a reference count each. Not thread-safe: the step loop owns it.
///
/// Free pages are kept as maximal runs, so that sequences get their pages in runs, which read faster. A run's length
/// stands at both of its ends (boundary tags), and runs are listed by the power of two below their length; so finding,
/// cutting and joining runs take constant time, and no operation costs more than the pages that it touches.
///
/// Pages are opened from 0 on, a stripe at a time, when fewer than half of those that are open would stay free: that
/// leaves sequences room to grow in runs, while little use of a large pool touches little memory.
///
/// free_pages() + held_pages() == total(), always.
class PagePool {
 public:
  static constexpr std::int32_t kAll = std::numeric_limits<std::int32_t>::max();

  /// Throws std::invalid_argument unless there are one page or more, and a stripe has so.
  explicit PagePool(std::int32_t num_pages, std::int32_t stripe = kAll);

  /// Appends `count` pages, each with one reference, to `pages`; or leaves all as it was and returns false if fewer are
  /// free. Pages that follow pages.back() come first, so a sequence that keeps its pages in one vector grows in place.
  bool allocate(std::int32_t count, std::vector<std::int32_t>& pages);

  void retain(std::int32_t page);   ///< one more reference; throws std::logic_error if the page is free
  void release(std::int32_t page);  ///< one reference less, the last frees it; throws std::logic_error if it is free

  /// Fetches what `release` looks at.
  void prefetch(std::int32_t page) const {
    __builtin_prefetch(&references_[page]);
    __builtin_prefetch(&runs_[page]);
  }

  std::int32_t references(std::int32_t page) const;
  std::span<const std::int32_t> references() const noexcept { return references_; }  ///< of each page
  std::int32_t total() const noexcept { return static_cast<std::int32_t>(references_.size()); }
  std::int32_t free_pages() const noexcept { return free_; }
  std::int32_t held_pages() const noexcept { return total() - free_; }
  std::int32_t opened() const noexcept { return opened_; }  ///< pages from 0 on; no other was handed out yet

 private:
  struct Run {
    std::int32_t length = 0;    ///< at both ends of a free run; 0 at every held page
    std::int32_t next = kNone;  ///< at its first page: neighbours in the list of its size class
    std::int32_t previous = kNone;
  };
  static constexpr std::int32_t kNone = -1;

  void open(std::int32_t count);
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
  std::int32_t stripe_;
  std::int32_t opened_ = 0;
};

}  // namespace quire
