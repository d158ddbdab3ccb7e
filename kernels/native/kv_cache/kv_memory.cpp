#include "kv_cache/kv_memory.h"

#include <algorithm>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

#include "compute/arena.h"

namespace quire {
namespace {

std::int32_t extent_of(const KvMemory::Shape& shape) {
  const std::int64_t page_bytes = shape.page_size / kTileTokens * shape.tile_bytes;
  return static_cast<std::int32_t>(std::max<std::int64_t>(1, std::int64_t{kHugePage} / page_bytes));
}

}  // namespace

KvMemory::KvMemory(Arena& arena, const ThreadPool& threads, const Shape& shape)
    : shape_(shape),
      base_(static_cast<std::byte*>(
          arena.allocate(static_cast<std::size_t>(shape.layers * shape.heads * tiles() * shape.tile_bytes)))),
      extent_(extent_of(shape)) {
  for (int thread = 0; threads.nodes() > 1 && thread < threads.size(); thread++)
    if (std::cmp_equal(threads.place(thread).node, places_.size())) places_.push_back(&threads.place(thread));
  prefault(extent_);
  worker_ = std::thread([this] { work(); });
}

KvMemory::~KvMemory() {
  stopping_ = true;
  wanted_.store(wanted_.load() + 1);
  worker_.join();
}

void KvMemory::prefault(std::int32_t pages) {
  const auto wanted = static_cast<std::uint32_t>(std::min(pages, shape_.num_pages));
  if (wanted > wanted_.load()) wanted_.store(wanted);
}

void KvMemory::work() {
  while (!stopping_) {
    const std::int32_t done = num_prefaulted_;
    const auto wanted = static_cast<std::int32_t>(wanted_.load());
    if (wanted > done) {
      const std::int32_t end = std::min(wanted, done + extent_);
      touch(done, end);
      num_prefaulted_.store(end, std::memory_order_release);
    } else {
      wanted_.sleep_while(static_cast<std::uint32_t>(done));
    }
  }
}

void KvMemory::touch(std::int32_t begin, std::int32_t end) {
  for (std::int64_t head = 0; head < shape_.heads && !stopping_; head++) {
    std::optional<ScopedAffinity> affinity;
    if (!places_.empty()) affinity.emplace(places_[static_cast<std::size_t>(head) % places_.size()]->cpus);
    for (std::int64_t layer = 0; layer < shape_.layers && !stopping_; layer++)
      touch_pages(tile(layer, head, begin * tiles_of_page()), tile(layer, head, end * tiles_of_page()));
  }
}

}  // namespace quire
