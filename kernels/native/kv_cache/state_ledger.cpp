#include "kv_cache/state_ledger.h"

#include <algorithm>
#include <array>
#include <span>

#include "checksum/checksum.h"

namespace quire {
namespace {

constexpr std::size_t kPieceBytes = std::size_t{1} << 20;  // of a record that one thread reads at a time

}  // namespace

StateLedger::StateLedger(KvFile& file, const PageLedger& pages, ThreadPool& threads, const StateShape& shape)
    : file_(file), pages_(pages), threads_(threads), shape_(shape) {}

void StateLedger::add(std::int32_t record, std::int32_t page) { added_.emplace_back(record, page); }

void StateLedger::seal() {
  const std::vector<std::uint64_t> sums = checksums(added_);
  for (std::size_t i = 0; i < added_.size(); i++) {
    const auto& [record, page] = added_[i];
    seal_of(record).checksum = sums[i];
    seal_of(record).page.store(page + 1, std::memory_order_release);
  }
  added_.clear();
}

void StateLedger::remove(std::int32_t record) {
  std::erase_if(added_, [&](const auto& added) { return added.first == record; });
  seal_of(record).page.store(0, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_release);  // orders this before any write to the record
}

std::vector<std::pair<std::int32_t, std::int32_t>> StateLedger::take_over() {
  std::vector<std::pair<std::int32_t, std::int32_t>> found, kept;
  for (std::int32_t record = 0; record < shape_.num_records; record++) {
    const std::int32_t page = seal_of(record).page.load(std::memory_order_acquire) - 1;
    if (page >= 0 && page < pages_.num_pages() && pages_.is_sealed(page)) found.emplace_back(record, page);
  }
  const std::vector<std::uint64_t> sums = checksums(found);
  std::vector<bool> has_snapshot(static_cast<std::size_t>(pages_.num_pages()));
  for (std::size_t i = 0; i < found.size(); i++) {
    const auto page = static_cast<std::size_t>(found[i].second);
    if (seal_of(found[i].first).checksum != sums[i] || has_snapshot[page]) continue;
    has_snapshot[page] = true;
    kept.push_back(found[i]);
  }
  std::vector<bool> is_kept(static_cast<std::size_t>(shape_.num_records));
  for (const auto& [record, page] : kept) is_kept[static_cast<std::size_t>(record)] = true;
  for (std::int32_t record = 0; record < shape_.num_records; record++)
    if (!is_kept[static_cast<std::size_t>(record)]) remove(record);
  std::ranges::stable_sort(kept, {}, [&](const auto& snapshot) { return pages_.last_use(snapshot.second); });
  return kept;
}

/// Returns the checksum of each snapshot: of its record, and the key of the prefix that its page ends. All threads take
/// part.
std::vector<std::uint64_t> StateLedger::checksums(const std::vector<std::pair<std::int32_t, std::int32_t>>& snapshots) {
  const auto size = static_cast<std::size_t>(shape_.record_bytes);
  const std::size_t pieces = (size + kPieceBytes - 1) / kPieceBytes;
  std::vector<std::uint64_t> hashes(snapshots.size() * (pieces + 1)), sums;
  if (snapshots.empty()) return sums;
  std::atomic<std::size_t> next{0};
  threads_.run([&](int) {
    for (std::size_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < snapshots.size() * pieces;) {
      const std::size_t snapshot = i / pieces, start = i % pieces * kPieceBytes;
      const std::byte* record = memory() + shape_.offset(snapshots[snapshot].first);
      hashes[snapshot * (pieces + 1) + i % pieces] =
          checksum(std::span(record + start, std::min(kPieceBytes, size - start)));
    }
  });
  for (std::size_t i = 0; i < snapshots.size(); i++) {
    const std::span parts = std::span(hashes).subspan(i * (pieces + 1), pieces + 1);
    const PrefixKey key = pages_.key(snapshots[i].second);
    parts.back() = checksum(std::as_bytes(std::span(key)));
    sums.push_back(checksum(std::as_bytes(parts)));
  }
  return sums;
}

}  // namespace quire
