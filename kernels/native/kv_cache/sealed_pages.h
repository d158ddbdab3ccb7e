#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <vector>

#include "kv_cache/prefix_key.h"

namespace quire {

/// A page that will not be written until it is removed from the prefix cache. `content` shows whether it has been.
struct SealedPage {
  std::int32_t page;
  PrefixKey prefix;       ///< key of the prefix before the page
  PrefixKey key;          ///< key of the prefix that ends with the page
  std::uint64_t content;  ///< checksum of its tiles
};

/// A queue of the pages that were sealed, for a thread that copies them elsewhere. If that thread is slow, the oldest
/// ones are left out. Thread-safe.
class SealedQueue {
 public:
  explicit SealedQueue(std::size_t capacity) : capacity_(capacity) {}

  void add(const SealedPage& page);

  /// Removes and returns the oldest pages, `most` at most; waits for one for some time.
  std::vector<SealedPage> take(std::size_t most, std::chrono::duration<double> patience);

  std::int64_t num_left_out() const;

 private:
  const std::size_t capacity_;
  mutable std::mutex mutex_;
  std::condition_variable added_;
  std::deque<SealedPage> pages_;
  std::int64_t num_left_out_ = 0;
};

/// The queues of all that copy sealed pages elsewhere, each of which gets every page.
class SealedPages {
 public:
  SealedPages(std::size_t num_queues, std::size_t capacity) {
    for (std::size_t i = 0; i < num_queues; i++) queues_.emplace_back(capacity);
  }

  void add(const SealedPage& page) {
    for (SealedQueue& queue : queues_) queue.add(page);
  }

  std::deque<SealedQueue>& queues() { return queues_; }

 private:
  std::deque<SealedQueue> queues_;  // which leaves each in its place
};

}  // namespace quire
