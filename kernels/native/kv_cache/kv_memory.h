#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <span>
#include <thread>
#include <vector>

#include "compute/abi.h"
#include "compute/device.h"
#include "compute/waitable.h"

namespace quire {

/// The KV of a layer in one tile of tokens.
struct KvLayerShape {
  std::int64_t heads;
  std::int64_t tile_bytes;    ///< bytes of K and V of one head (emit/kv.py)
  std::int64_t value_offset;  ///< offset of V in a tile of a head, in bytes
};

/// The KV tiles of a model, by layer and head; each head holds the tiles of all pages. Layers may differ in their
/// heads.
///
/// The system allocates and clears memory when it is touched: the first write to an extent would fault in a huge page
/// for every head of every layer and delay the step. So a background thread touches memory before it is used, in
/// chunks: the pages of an extent in one run, a huge page or a few. As it competes with steps for cores and for the
/// memory's bandwidth, it has a low priority and rests after each chunk, unless the chunk's pages may be handed out
/// already.
class KvMemory {
 public:
  struct Shape {
    std::vector<KvLayerShape> layers;
    std::int32_t block_size;  ///< tokens of a page
    std::int32_t num_pages;
  };

  /// Returns the bytes that the tiles take. Throws std::invalid_argument unless there is a page of at least one tile.
  static std::size_t bytes(const Shape& shape);

  /// `base` is memory of so many bytes, for a device that must outlive this. Starts with the first extent.
  KvMemory(std::byte* base, const Device& device, const Shape& shape);
  ~KvMemory();
  KvMemory(const KvMemory&) = delete;
  KvMemory& operator=(const KvMemory&) = delete;

  /// Throws std::out_of_range for a layer that does not exist.
  std::byte* layer(std::int64_t layer) const;
  std::int64_t tiles() const { return shape_.num_pages * tiles_of_page(); }  ///< tiles of one head of a layer
  std::int64_t tiles_of_page() const { return shape_.block_size / kTileTokens; }

  /// The bytes of a page lie in runs, one for each head of each layer in turn, as long as its tiles.
  std::int64_t runs_of_page() const { return std::ssize(runs_); }
  std::span<std::byte> run_of_page(std::int32_t page, std::int64_t run) const {
    return pages_of_run(page, std::int64_t{page} + 1, run);
  }
  std::size_t page_bytes() const { return page_bytes_; }

  /// Copies the first `tiles` tiles of a page, in every head, to another page.
  void copy_tiles(std::int32_t from, std::int32_t to, std::int64_t tiles) const;

  /// Clears the values of a tile in every head.
  void clear_values(std::int64_t tile) const;

  const Device& device() const { return device_; }
  const Shape& shape() const { return shape_; }
  std::int32_t extent() const { return extent_; }  ///< pages whose tiles fill a huge page in every head

  /// Lets the background thread touch pages [0, due) without rests, and then those up to `ahead`; if that is not the
  /// end of an extent, as many of its chunks as make up the share. Returns immediately.
  void prefault(std::int64_t due, std::int64_t ahead);

  std::int32_t num_prefaulted() const;  ///< number of pages that would fill the touched chunks

 private:
  /// A head of a layer.
  struct Run {
    std::int64_t head;  ///< number in its layer
    std::byte* tiles;
    std::int64_t tile_bytes;
  };

  std::uint32_t chunks(std::int64_t pages) const;
  void work();
  void touch(std::int64_t chunk);

  /// Successive layers whose heads are alike, as one layer with all of these heads.
  struct Layers {
    std::byte* tiles;
    KvLayerShape shape;
  };

  std::span<std::byte> pages_of_run(std::int64_t begin, std::int64_t end, std::int64_t run) const;
  Pieces in_every_head(const KvLayerShape& layer, std::int64_t bytes) const;

  const Device& device_;
  Shape shape_;
  std::vector<std::byte*> layers_;
  std::vector<Layers> alike_;
  std::vector<Run> runs_;
  std::size_t page_bytes_ = 0;
  std::int32_t extent_;
  Waitable wanted_;                           ///< number of chunks to touch
  std::atomic<std::uint32_t> due_{0};         ///< number of chunks to touch without rests
  std::atomic<std::int64_t> num_touched_{0};  ///< number of chunks touched so far
  std::atomic<bool> stopping_{false};
  std::thread worker_;
};

}  // namespace quire
