#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <thread>
#include <vector>

#include "compute/arena.h"
#include "compute/thread_pool.h"
#include "compute/waitable.h"

namespace quire {

inline constexpr std::int64_t kTileTokens = 32;  ///< of a KV tile

/// The KV tiles of a model, layer by layer and head by head, where each head has the tiles of all pages.
///
/// The system gives memory when it is touched, and clears it then: a huge page in every head of every layer, as the
/// first page in that stripe is written. That would hold up a step, so a thread of its own touches a stripe ahead.
class KvMemory {
 public:
  struct Shape {
    std::int64_t layers;
    std::int64_t heads;
    std::int64_t tile_bytes;  ///< of one head (emit/kv.py)
    std::int32_t page_size;   ///< tokens of a page
    std::int32_t num_pages;
  };

  /// Begins with the first stripe. `threads` compute with it: on several nodes, each node has as many heads near it.
  KvMemory(Arena& arena, const ThreadPool& threads, const Shape& shape);
  ~KvMemory();
  KvMemory(const KvMemory&) = delete;
  KvMemory& operator=(const KvMemory&) = delete;

  std::byte* layer(std::int64_t layer) const { return base_ + layer * shape_.heads * tiles() * shape_.tile_bytes; }
  std::byte* tile(std::int64_t layer, std::int64_t head, std::int64_t tile) const {
    return this->layer(layer) + (head * tiles() + tile) * shape_.tile_bytes;
  }
  std::int64_t tiles() const { return shape_.num_pages * tiles_of_page(); }  ///< of a head
  std::int64_t tiles_of_page() const { return shape_.page_size / kTileTokens; }
  std::int32_t stripe() const { return stripe_; }  ///< pages of a head that lie on one huge page

  /// Lets the thread touch pages [0, pages) if it has not yet. Returns at once.
  void prepare(std::int32_t pages);

  std::int32_t num_prepared() const { return num_prepared_.load(std::memory_order_acquire); }  ///< pages from 0 on

 private:
  void work();
  void touch(std::int32_t begin, std::int32_t end);

  Shape shape_;
  std::byte* base_;
  std::int32_t stripe_;
  std::vector<const Place*> places_;  ///< by node, where there are several
  Waitable wanted_;                   ///< pages to prepare
  std::atomic<bool> stopping_{false};
  std::atomic<std::int32_t> num_prepared_{0};
  std::thread worker_;
};

}  // namespace quire
