#include "kv_cache/state_ledger.h"

#include <algorithm>
#include <iterator>

#include "checksum/checksum.h"
#include "checksum/run_checksums.h"
#include "kv_cache/prefix_key.h"

namespace quire {

StateLedger::StateLedger(KvFile& file, const PageLedger& pages, const StateMemory& memory, const StateShape& shape,
                         SealedPages* log)
    : file_(file), pages_(pages), memory_(memory), shape_(shape), log_(log) {}

void StateLedger::add(std::int32_t record, std::int32_t page, bool is_logged) {
  added_.push_back({record, page, is_logged});
}

void StateLedger::seal() {
  const bool has_checksums = memory_.device->in_host_memory();
  const std::vector<std::uint64_t> sums = has_checksums ? checksums(added_) : std::vector<std::uint64_t>(added_.size());
  for (std::size_t i = 0; i < added_.size(); i++) {
    const auto& [record, page, is_logged] = added_[i];
    seal_of(record).checksum = sums[i];
    seal_of(record).page.store(page + 1, std::memory_order_release);
    if (is_logged) log_pieces(record, page);
  }
  added_.clear();
}

void StateLedger::log(std::int32_t record) {
  const auto added = std::ranges::find(added_, record, &Added::record);
  if (added != added_.end())
    added->is_logged = true;
  else if (const std::int32_t page = seal_of(record).page - 1; page >= 0)
    log_pieces(record, page);
}

void StateLedger::log_pieces(std::int32_t record, std::int32_t page) {
  if (log_ == nullptr) return;
  const PrefixKey prefix = pages_.key(page);
  for (std::int32_t piece = 0; piece < shape_.num_pieces(); piece++)
    log_->add(first_piece(record) + piece, prefix, state_key(prefix, piece));
}

void StateLedger::remove(std::int32_t record) {
  std::erase_if(added_, [&](const Added& added) { return added.record == record; });
  seal_of(record).page.store(0, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_release);  // orders this before any write to the record
  for (std::int32_t piece = 0; log_ != nullptr && piece < shape_.num_pieces(); piece++)
    log_->remove(first_piece(record) + piece);
}

std::vector<std::pair<std::int32_t, std::int32_t>> StateLedger::take_over() {
  std::vector<Added> found;
  for (std::int32_t record = 0; record < shape_.num_records; record++) {
    const std::int32_t page = seal_of(record).page.load(std::memory_order_acquire) - 1;
    if (page >= 0 && page < pages_.num_pages() && pages_.is_sealed(page)) found.push_back({record, page, true});
  }
  const std::vector<std::uint64_t> sums = checksums(found);
  std::vector<std::pair<std::int32_t, std::int32_t>> kept;
  std::vector<bool> has_snapshot(static_cast<std::size_t>(pages_.num_pages()));
  std::vector<bool> is_kept(static_cast<std::size_t>(shape_.num_records));
  for (std::size_t i = 0; i < found.size(); i++) {
    const auto& [record, page, is_logged] = found[i];
    if (seal_of(record).checksum != sums[i] || has_snapshot[static_cast<std::size_t>(page)]) continue;
    has_snapshot[static_cast<std::size_t>(page)] = is_kept[static_cast<std::size_t>(record)] = true;
    kept.emplace_back(record, page);
    log_pieces(record, page);
  }
  for (std::int32_t record = 0; record < shape_.num_records; record++)
    if (!is_kept[static_cast<std::size_t>(record)]) remove(record);
  std::ranges::stable_sort(kept, {}, [&](const auto& snapshot) { return pages_.last_use(snapshot.second); });
  return kept;
}

/// Returns the checksum of each snapshot: of the pieces of its record, and the key of the prefix that its page ends.
/// All threads take part.
std::vector<std::uint64_t> StateLedger::checksums(std::span<const Added> snapshots) {
  const auto size = static_cast<std::size_t>(shape_.record_bytes), step = static_cast<std::size_t>(shape_.piece_bytes);
  std::vector<std::uint64_t> sums;
  if (snapshots.empty()) return sums;
  std::vector<std::span<std::byte>> runs;
  for (const Added& added : snapshots)
    std::ranges::copy(split({memory_.base + shape_.offset(added.record), size}, step), std::back_inserter(runs));
  const std::vector<std::uint64_t> hashes = checksums_of(runs, memory_.device->threads());
  for (auto next = hashes.begin(); const Added& added : snapshots) {
    std::vector<std::uint64_t> parts(next, next + shape_.num_pieces());
    next += shape_.num_pieces();
    const PrefixKey key = pages_.key(added.page);
    parts.push_back(checksum(std::as_bytes(std::span(key))));
    sums.push_back(checksum(std::as_bytes(std::span(parts))));
  }
  return sums;
}

}  // namespace quire
