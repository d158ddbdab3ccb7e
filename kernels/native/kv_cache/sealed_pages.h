#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <vector>

#include "kv_cache/prefix_key.h"

namespace quire {

/// A page that will not be written until it is removed from the prefix cache.
struct SealedPage {
  std::int32_t page;
  PrefixKey prefix;    ///< key of the prefix before the page
  PrefixKey key;       ///< key of the prefix that ends with the page
  std::uint64_t seal;  ///< a number that no other seal has
};

/// The seals of pages. One thread sets and breaks them; others copy pages, and then ask whether the seal still holds: a
/// copy is that of the sealed page if it does.
class Seals {
 public:
  explicit Seals(std::size_t num_pages) : seals_(num_pages) {}

  /// Returns the seal of a page, which is written, and sets one if it has none.
  std::uint64_t set(std::int32_t page);

  /// Breaks the seal of a page before it is written.
  void remove(std::int32_t page);

  /// Returns whether a page still has a seal, after all that was read of it before.
  bool holds(std::int32_t page, std::uint64_t seal) const;

 private:
  std::vector<std::atomic<std::uint64_t>> seals_;  ///< 0: none
  std::uint64_t last_ = 0;
};

/// A queue of the pages that were sealed, for a thread that copies them elsewhere. If that thread is slow, the oldest
/// ones are left out. Thread-safe.
class SealedQueue {
 public:
  SealedQueue(std::size_t capacity, const Seals& seals) : capacity_(capacity), seals_(seals) {}

  void add(const SealedPage& page);

  /// Removes and returns the oldest pages, `most` at most; waits for one for some time.
  std::vector<SealedPage> take(std::size_t most, std::chrono::duration<double> patience);

  /// Returns false once the page may have been written: see Seals.
  bool is_sealed(std::int32_t page, std::uint64_t seal) const { return seals_.holds(page, seal); }

  std::int64_t num_left_out() const;

 private:
  const std::size_t capacity_;
  const Seals& seals_;
  mutable std::mutex mutex_;
  std::condition_variable added_;
  std::deque<SealedPage> pages_;
  std::int64_t num_left_out_ = 0;
};

/// The queues of all that copy sealed pages elsewhere, each of which gets every page.
class SealedPages {
 public:
  SealedPages(std::size_t num_queues, std::size_t num_pages) : seals_(num_pages) {
    for (std::size_t i = 0; i < num_queues; i++) queues_.emplace_back(num_pages, seals_);
  }

  void add(std::int32_t page, const PrefixKey& prefix, const PrefixKey& key) {
    const SealedPage sealed{page, prefix, key, seals_.set(page)};
    for (SealedQueue& queue : queues_) queue.add(sealed);
  }

  /// Breaks the seal of a page before it is written.
  void remove(std::int32_t page) { seals_.remove(page); }

  std::deque<SealedQueue>& queues() { return queues_; }

 private:
  Seals seals_;
  std::deque<SealedQueue> queues_;  // which leaves each in its place
};

}  // namespace quire
