#include "kv_cache/state_store.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>

#include "kv_cache/state_ledger.h"

namespace quire {
namespace {

constexpr std::int64_t kLine = 64;         // bytes
constexpr std::int32_t kLeastRecords = 2;  // a sequence reads a snapshot and writes a record of its own

/// Returns the bytes from one record to the next: whole cache lines.
std::int64_t stride_of(const StateShape& shape) { return (shape.record_bytes + kLine - 1) / kLine * kLine; }

}  // namespace

std::int64_t StateShape::bytes() const {
  if (record_bytes == 0) return 0;
  if (record_bytes < 0 || num_records < kLeastRecords || snapshot_pages < 0 ||
      record_bytes > std::numeric_limits<std::int64_t>::max() / num_records - kLine)
    throw std::invalid_argument("num_records=" + std::to_string(num_records) +
                                " of record_bytes=" + std::to_string(record_bytes) +
                                " with snapshot_pages=" + std::to_string(snapshot_pages) + "; give at least " +
                                std::to_string(kLeastRecords) + " records of 1 byte that memory can hold, and 0 pages");
  return stride_of(*this) * num_records;
}

std::int32_t StateShape::num_pieces() const {
  return piece_bytes == 0 ? 0 : static_cast<std::int32_t>((record_bytes + piece_bytes - 1) / piece_bytes);
}

std::int64_t StateShape::offset(std::int32_t record) const { return record * stride_of(*this); }

StateStore::StateStore(const StateShape& shape, std::int32_t num_pages, StateLedger* ledger, const StateMemory& memory)
    : shape_(shape),
      ledger_(ledger),
      memory_(memory),
      records_(static_cast<std::size_t>(shape.num_records)),
      snapshots_(static_cast<std::size_t>(num_pages), kNone) {
  const auto bytes = static_cast<std::size_t>(shape.bytes());
  if (memory_.base == nullptr) memory_.base = static_cast<std::byte*>(arena_.allocate(bytes));
  for (std::int32_t record = 0; record < total(); record++) at(record).place = free_.insert(free_.end(), record);
}

void StateStore::take_over() {
  if (ledger_ == nullptr) return;
  for (const auto& [record, page] : ledger_->take_over()) {
    snapshots_[static_cast<std::size_t>(at(record).page = page)] = record;
    cached_.splice(cached_.end(), free_, at(record).place);
  }
}

std::int32_t StateStore::acquire() {
  if (free_.empty()) {
    if (cached_.empty()) return kNone;
    detach(at(cached_.front()).page);
    num_evicted_++;
  }
  const std::int32_t record = free_.front();
  at(record).holders = 1;
  held_.splice(held_.end(), free_, free_.begin());
  return record;
}

void StateStore::retain(std::int32_t record) {
  if (at(record).holders++ == 0) held_.splice(held_.end(), cached_, at(record).place);
}

void StateStore::release(std::int32_t record) {
  if (--at(record).holders > 0) return;
  if (at(record).page == kNone)
    free_.splice(free_.begin(), held_, at(record).place);  // it may still be in the CPU's cache
  else
    cached_.splice(cached_.end(), held_, at(record).place);
}

bool StateStore::attach(std::int32_t record, std::int32_t page, bool is_logged) {
  std::int32_t& snapshot = snapshots_[static_cast<std::size_t>(page)];
  const bool is_new = snapshot == kNone;
  if (is_new) at(snapshot = record).page = page;
  if (is_new && ledger_ != nullptr) ledger_->add(record, page, is_logged);
  release(record);
  return is_new;
}

void StateStore::log(std::int32_t record) {
  if (ledger_ != nullptr) ledger_->log(record);
}

void StateStore::detach(std::int32_t page) {
  const std::int32_t record = snapshot(page);
  if (record == kNone) return;
  snapshots_[static_cast<std::size_t>(page)] = at(record).page = kNone;
  if (ledger_ != nullptr) ledger_->remove(record);
  if (at(record).holders == 0) free_.splice(free_.begin(), cached_, at(record).place);
}

std::span<std::byte> StateStore::record(std::int32_t record) const {
  if (record < 0 || record >= total())
    throw std::out_of_range("record " + std::to_string(record) + " of " + std::to_string(total()));
  return {memory_.base + shape_.offset(record), static_cast<std::size_t>(shape_.record_bytes)};
}

std::span<std::byte> StateStore::piece(std::int32_t piece) const {
  const std::int32_t pieces = shape_.num_pieces();
  if (pieces == 0) throw std::out_of_range("records of state have no pieces");
  const std::span<std::byte> whole = record(piece / pieces);
  const auto size = static_cast<std::size_t>(shape_.piece_bytes), start = piece % pieces * size;
  return whole.subspan(start, std::min(size, whole.size() - start));
}

void StateStore::copy(std::int32_t from, std::int32_t to) {
  const std::span<std::byte> source = record(from), target = record(to);
  if (memory_.device == nullptr)
    std::ranges::copy(source, target.begin());
  else
    memory_.device->copy(target.data(), source.data(), {source.size()});
}

}  // namespace quire
