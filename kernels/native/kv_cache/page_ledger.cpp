#include "kv_cache/page_ledger.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <iterator>
#include <ranges>
#include <utility>

#include "checksum/checksum.h"

namespace quire {
namespace {

template <class T, std::size_t size>
std::uint64_t hash_of(std::span<T, size> values) {
  return checksum(std::as_bytes(values));
}

}  // namespace

PageLedger::PageLedger(KvFile& file, const KvMemory& memory, ThreadPool& threads, const PrefixKey& model)
    : file_(file), memory_(memory), threads_(threads), model_(model) {}

void PageLedger::add(std::int32_t page, std::int32_t parent, const PrefixKey& prefix) {
  record(page).parent = std::max(parent, kNone);
  record(page).prefix = prefix;
  record(page).state.store(PageRecord::kFull, std::memory_order_relaxed);
  use(page);
  added_.push_back(page);
}

void PageLedger::seal() {
  // A page may have been removed since it was added, and added again.
  std::erase_if(added_, [&](std::int32_t page) { return record(page).state != PageRecord::kFull; });
  const std::vector<std::uint64_t> sums = checksums(added_);
  for (std::size_t i = 0; i < added_.size(); i++) {
    record(added_[i]).checksum = sums[i];
    record(added_[i]).state.store(PageRecord::kSealed, std::memory_order_release);
  }
  added_.clear();
}

void PageLedger::remove(std::int32_t page) {
  record(page).state.store(PageRecord::kEmpty, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_release);  // before any write to the page
}

std::vector<std::int32_t> PageLedger::take_over() {
  std::vector<std::int32_t> pages = in_order(intact_pages());
  for (std::int32_t page : std::views::reverse(pages))
    if (parent(page) != kNone) record(parent(page)).last_use = std::max(last_use(parent(page)), last_use(page));
  std::vector<bool> is_kept(file_.records().size());
  for (std::int32_t page : pages) is_kept[static_cast<std::size_t>(page)] = true;
  for (std::int32_t page = 0; std::cmp_less(page, is_kept.size()); page++) {
    if (is_kept[static_cast<std::size_t>(page)]) continue;
    num_dropped_ += record(page).state == PageRecord::kSealed;
    remove(page);
  }
  num_taken_over_ = static_cast<std::int32_t>(pages.size());
  return pages;
}

/// Returns the sealed pages whose checksum is right.
std::vector<std::int32_t> PageLedger::intact_pages() {
  std::vector<std::int32_t> pages, intact;
  for (std::int32_t page = 0; std::cmp_less(page, file_.records().size()); page++)
    if (record(page).state == PageRecord::kSealed) pages.push_back(page);
  const std::vector<std::uint64_t> sums = checksums(pages);
  for (std::size_t i = 0; i < pages.size(); i++)
    if (record(pages[i]).checksum == sums[i]) intact.push_back(pages[i]);
  return intact;
}

/// Returns those of the pages that follow each other from a root on, by number and key of the page before, in an order
/// in which each comes after its parent.
std::vector<std::int32_t> PageLedger::in_order(std::span<const std::int32_t> pages) const {
  const auto parent_of = [&](std::int32_t page) { return parent(page); };
  std::vector<std::int32_t> by_parent(pages.begin(), pages.end()), ordered;
  std::ranges::sort(by_parent, {}, parent_of);
  std::ranges::copy(std::ranges::equal_range(by_parent, kNone, {}, parent_of), std::back_inserter(ordered));
  for (std::size_t i = 0; i < ordered.size(); i++) {
    const auto children = std::ranges::equal_range(by_parent, ordered[i], {}, parent_of);
    const PrefixKey prefix = children.empty() ? PrefixKey() : key(ordered[i]);
    for (std::int32_t child : children)
      if (this->prefix(child) == prefix) ordered.push_back(child);
  }
  return ordered;
}

/// Returns a checksum of each page: of its tiles, its tokens and its place in the tree.
std::vector<std::uint64_t> PageLedger::checksums(std::span<const std::int32_t> pages) {
  const std::vector<std::uint64_t> tiles = hash_tiles(pages);
  std::vector<std::uint64_t> sums;
  for (std::size_t i = 0; i < pages.size(); i++) {
    const PageRecord& page = record(pages[i]);
    const std::size_t count = tiles.size() / pages.size();
    const std::array<std::uint64_t, 4> parts{hash_of(std::span(tiles).subspan(i * count, count)),
                                             hash_of(tokens_of(pages[i])), hash_of(std::span(page.prefix)),
                                             static_cast<std::uint64_t>(page.parent)};
    sums.push_back(hash_of(std::span(parts)));
  }
  return sums;
}

/// Returns the hashes of the tiles of each page: [pages][layers][heads]. All threads take part.
std::vector<std::uint64_t> PageLedger::hash_tiles(std::span<const std::int32_t> pages) {
  const std::int64_t heads = memory_.shape().heads, layers = memory_.shape().layers, tiles = memory_.tiles_of_page();
  const auto bytes = static_cast<std::size_t>(tiles * memory_.shape().tile_bytes);
  std::vector<std::uint64_t> hashes(pages.size() * static_cast<std::size_t>(layers * heads));
  if (pages.empty()) return hashes;
  std::atomic<std::int64_t> next{0};
  threads_.run([&](int) {
    for (std::int64_t item; (item = next.fetch_add(1, std::memory_order_relaxed)) < std::ssize(pages) * layers;)
      for (std::int64_t head = 0; head < heads; head++) {
        const std::int64_t first = pages[static_cast<std::size_t>(item / layers)] * tiles;
        const std::span memory(memory_.tile(item % layers, head, first), bytes);
        hashes[static_cast<std::size_t>(item * heads + head)] = hash_of(memory);
      }
  });
  return hashes;
}

std::span<const std::int32_t> PageLedger::tokens_of(std::int32_t page) const {
  const auto size = file_.tokens().size() / file_.records().size();
  return file_.tokens().subspan(static_cast<std::size_t>(page) * size, size);
}

}  // namespace quire
