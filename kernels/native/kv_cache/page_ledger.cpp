#include "kv_cache/page_ledger.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <iterator>
#include <ranges>
#include <utility>

#include "checksum/checksum.h"
#include "checksum/run_checksums.h"

namespace quire {
namespace {

template <class T, std::size_t size>
std::uint64_t hash_of(std::span<T, size> values) {
  return checksum(std::as_bytes(values));
}

}  // namespace

PageLedger::PageLedger(KvFile& file, const KvMemory& memory, const PrefixKey& model, SealedPages* log)
    : file_(file), memory_(memory), model_(model), log_(log) {}

void PageLedger::add(std::int32_t page, std::int32_t parent, const PrefixKey& prefix,
                     std::optional<std::uint64_t> content) {
  record(page).parent = std::max(parent, kNone);
  record(page).prefix = prefix;
  record(page).state.store(PageRecord::kFull, std::memory_order_relaxed);
  use(page);
  added_.push_back({page, content});
}

void PageLedger::seal() {
  std::vector<std::int32_t> unknown;
  for (const Added& added : added_)
    if (has_checksums() && !added.content) unknown.push_back(added.page);
  const std::vector<std::uint64_t> found = contents(unknown);
  auto next = found.begin();
  for (const Added& added : added_) {
    if (has_checksums())
      record(added.page).checksum = checksum_of(added.page, added.content ? *added.content : *next++);
    record(added.page).state.store(PageRecord::kSealed, std::memory_order_release);
    log(added.page);
  }
  added_.clear();
}

/// Tells those who copy sealed pages elsewhere of one.
void PageLedger::log(std::int32_t page) {
  if (log_ != nullptr) log_->add(page, prefix(page), key(page));
}

void PageLedger::remove(std::int32_t page) {
  std::erase_if(added_, [&](const Added& added) { return added.page == page; });
  record(page).state.store(PageRecord::kEmpty, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_release);  // orders this before any write to the page
  if (log_ != nullptr) log_->remove(page);
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
  for (std::int32_t page : pages) log(page);
  num_taken_over_ = static_cast<std::int32_t>(pages.size());
  return pages;
}

/// Returns the sealed pages whose checksum is right, in order.
std::vector<std::int32_t> PageLedger::intact_pages() {
  std::vector<std::int32_t> pages;
  for (std::int32_t page = 0; std::cmp_less(page, file_.records().size()); page++)
    if (record(page).state == PageRecord::kSealed) pages.push_back(page);
  const std::vector<std::uint64_t> found = contents(pages);
  std::vector<std::int32_t> intact;
  for (std::size_t i = 0; i < pages.size(); i++)
    if (record(pages[i]).checksum == checksum_of(pages[i], found[i])) intact.push_back(pages[i]);
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

/// Returns the checksum of a page: of its tiles, its tokens and its place in the tree.
std::uint64_t PageLedger::checksum_of(std::int32_t page, std::uint64_t content) const {
  const std::array<std::uint64_t, 4> parts{content, hash_of(tokens_of(page)), hash_of(std::span(prefix(page))),
                                           static_cast<std::uint64_t>(parent(page))};
  return hash_of(std::span(parts));
}

/// Returns the checksum of the tiles of each page. All threads take part.
std::vector<std::uint64_t> PageLedger::contents(std::span<const std::int32_t> pages) {
  std::vector<std::span<std::byte>> runs;
  for (const std::int32_t page : pages)
    for (std::int64_t run = 0; run < memory_.runs_of_page(); run++) runs.push_back(memory_.run_of_page(page, run));
  const std::vector<std::uint64_t> hashes = checksums_of(runs, memory_.device().threads());
  const auto count = static_cast<std::size_t>(memory_.runs_of_page());
  std::vector<std::uint64_t> sums;
  for (std::size_t i = 0; i < pages.size(); i++) sums.push_back(hash_of(std::span(hashes).subspan(i * count, count)));
  return sums;
}

std::span<const std::int32_t> PageLedger::tokens_of(std::int32_t page) const {
  const auto size = file_.tokens().size() / file_.records().size();
  return file_.tokens().subspan(static_cast<std::size_t>(page) * size, size);
}

}  // namespace quire
