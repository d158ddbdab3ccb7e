#include "kv_cache/kv_memory.h"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <string>

#include "compute/arena.h"

namespace quire {
namespace {

constexpr int kNiceness = 5;  // above that of the process: a step's threads go first, and yet this one isn't starved
constexpr int kRest = 2;      // rest after a chunk, as a multiple of its time: steps have the core for two thirds

std::int32_t extent_of(const KvMemory::Shape& shape) {
  const std::int64_t tile_bytes = std::ranges::min(shape.layers, {}, &KvLayerShape::tile_bytes).tile_bytes;
  const std::int64_t run_bytes = shape.block_size / kTileTokens * tile_bytes;
  return static_cast<std::int32_t>(std::max<std::int64_t>(1, std::int64_t{kHugePage} / run_bytes));
}

}  // namespace

std::size_t KvMemory::bytes(const Shape& shape) {
  if (shape.num_pages < 1 || shape.block_size < kTileTokens)
    throw std::invalid_argument("num_pages=" + std::to_string(shape.num_pages) +
                                " of block_size=" + std::to_string(shape.block_size) +
                                " is too small; give at least 1 page of " + std::to_string(kTileTokens) + " tokens");
  std::int64_t bytes = 0;  // of a tile
  for (const KvLayerShape& layer : shape.layers) bytes += layer.heads * layer.tile_bytes;
  return static_cast<std::size_t>(bytes * shape.num_pages * (shape.block_size / kTileTokens));
}

KvMemory::KvMemory(std::byte* base, const Device& device, const Shape& shape)
    : device_(device), shape_(shape), extent_(extent_of(shape)) {
  for (const KvLayerShape& layer : shape_.layers) {
    layers_.push_back(base);
    if (alike_.empty() || alike_.back().shape.tile_bytes != layer.tile_bytes ||
        alike_.back().shape.value_offset != layer.value_offset)
      alike_.push_back({base, {0, layer.tile_bytes, layer.value_offset}});
    alike_.back().shape.heads += layer.heads;
    for (std::int64_t head = 0; head < layer.heads; head++, base += tiles() * layer.tile_bytes)
      runs_.push_back({head, base, layer.tile_bytes});
    page_bytes_ += static_cast<std::size_t>(layer.heads * tiles_of_page() * layer.tile_bytes);
  }
  prefault(extent_, extent_);
  worker_ = std::thread([this] { work(); });
}

KvMemory::~KvMemory() {
  stopping_ = true;
  wanted_.store(wanted_.load() + 1);
  worker_.join();
}

std::byte* KvMemory::layer(std::int64_t layer) const {
  if (layer < 0 || layer >= std::ssize(layers_))
    throw std::out_of_range("layer " + std::to_string(layer) + " of " + std::to_string(layers_.size()));
  return layers_[static_cast<std::size_t>(layer)];
}

/// Returns pages [begin, end) of a run.
std::span<std::byte> KvMemory::pages_of_run(std::int64_t begin, std::int64_t end, std::int64_t run) const {
  const Run& found = runs_[static_cast<std::size_t>(run)];
  const std::int64_t bytes = tiles_of_page() * found.tile_bytes;
  return {found.tiles + begin * bytes, static_cast<std::size_t>((end - begin) * bytes)};
}

Pieces KvMemory::in_every_head(const KvLayerShape& layer, std::int64_t bytes) const {
  return {static_cast<std::size_t>(bytes), layer.heads, static_cast<std::size_t>(tiles() * layer.tile_bytes)};
}

void KvMemory::copy_tiles(std::int32_t from, std::int32_t to, std::int64_t tiles) const {
  for (const auto& [memory, layer] : alike_) {
    const std::int64_t page_bytes = tiles_of_page() * layer.tile_bytes;
    device_.copy(memory + to * page_bytes, memory + from * page_bytes, in_every_head(layer, tiles * layer.tile_bytes));
  }
}

void KvMemory::clear_values(std::int64_t tile) const {
  for (const auto& [memory, layer] : alike_)
    device_.clear(memory + tile * layer.tile_bytes + layer.value_offset,
                  in_every_head(layer, layer.tile_bytes - layer.value_offset));
}

void KvMemory::prefault(std::int64_t due, std::int64_t ahead) {
  due_.store(chunks(due), std::memory_order_relaxed);
  if (const std::uint32_t wanted = chunks(std::max(due, ahead)); wanted > wanted_.load()) wanted_.store(wanted);
}

std::int32_t KvMemory::num_prefaulted() const {
  const std::int64_t pages = num_touched_.load(std::memory_order_acquire) * extent_ / runs_of_page();
  return static_cast<std::int32_t>(std::min<std::int64_t>(pages, shape_.num_pages));
}

/// Returns the number of chunks with these pages: all runs of whole extents, and of the last one as many as its share.
std::uint32_t KvMemory::chunks(std::int64_t pages) const {
  const std::int64_t whole = (shape_.num_pages + extent_ - 1) / extent_ * runs_of_page();
  return static_cast<std::uint32_t>(std::min((pages * runs_of_page() + extent_ - 1) / extent_, whole));
}

void KvMemory::work() {
  using Clock = std::chrono::steady_clock;
  const auto thread = static_cast<id_t>(gettid());
  setpriority(PRIO_PROCESS, thread, getpriority(PRIO_PROCESS, thread) + kNiceness);  // only this thread's, on Linux
  for (std::uint32_t chunk = 0;;) {
    const std::uint32_t wanted = wanted_.load();
    if (stopping_) return;  // the destructor wants one more than there may be
    if (chunk == wanted) {
      wanted_.sleep_while(chunk);
      continue;
    }
    const auto begun = Clock::now();
    touch(chunk++);
    num_touched_.store(chunk, std::memory_order_release);
    if (chunk > due_.load(std::memory_order_relaxed)) std::this_thread::sleep_for(kRest * (Clock::now() - begun));
  }
}

/// Touches the pages of an extent in one run.
void KvMemory::touch(std::int64_t chunk) {
  const std::int64_t run = chunk % runs_of_page(), begin = chunk / runs_of_page() * extent_;
  const auto pages = pages_of_run(begin, std::min<std::int64_t>(begin + extent_, shape_.num_pages), run);
  device_.touch(pages.data(), pages.data() + pages.size(), runs_[static_cast<std::size_t>(run)].head);
}

}  // namespace quire
