#include "kv_cache/sequence_states.h"

#include <algorithm>
#include <bit>
#include <stdexcept>
#include <string>
#include <utility>

namespace quire {

SequenceStates::SequenceStates(StateStore& store, std::int32_t block_size, std::int64_t num_prompt_tokens,
                               bool shares_pages)
    : store_(store),
      block_size_(block_size),
      shares_pages_(shares_pages),
      prompt_end_(std::max<std::int64_t>(num_prompt_tokens - 1, 0) / block_size * block_size) {}

void SequenceStates::begin(std::int64_t length, std::int32_t snapshot) {
  cancel();
  if (snapshot != kNone) store_.retain(snapshot);
  if (from_ != kNone) store_.release(from_);
  from_ = snapshot;
  length_ = length;
  lacks_snapshot_ = false;
}

void SequenceStates::copy(const SequenceStates& other) {
  begin(other.length_, other.from_);
  if (from_ == kNone && length_ > 0) store_.copy(other.own_, own_);
}

bool SequenceStates::reserve(std::int64_t num_tokens) {
  if (own_ == kNone && written_.empty() && num_tokens > length_) own_ = store_.acquire();
  return own_ != kNone || !written_.empty() || num_tokens <= length_;
}

StatePath SequenceStates::write(std::int64_t start, std::int64_t end, std::int64_t certain) {
  cancel();
  if (start != length_ || start > certain || certain > end || start == end)
    throw std::invalid_argument("tokens " + std::to_string(start) + " to " + std::to_string(end) + ", of which " +
                                std::to_string(certain) + " are certain, cannot be computed from the state after " +
                                std::to_string(length_));
  if (own_ == kNone) throw std::logic_error("there is no record to write states to; reserve it first");
  const auto add = [&](std::int64_t length) {
    const std::int32_t record = store_.acquire();
    if (record != kNone) written_.push_back({length, record});
    return record != kNone;
  };
  const std::int32_t from = start == 0 ? kNone : from_ != kNone ? from_ : own_;
  const std::int64_t first = std::max(certain, start + 1);
  const bool keeps_own = from == own_ && (certain == start || lacks_snapshot_);
  if (!keeps_own || !add(first)) {
    written_.push_back({first, own_});
    if (from == own_) length_ = kLost;
    own_ = kNone;
  }
  for (std::int64_t length = first + 1; length <= end; length++) add(length);
  if (shares_pages_)
    for (std::int64_t length = certain / block_size_ * block_size_; length > start; length -= block_size_)
      if (leaves_snapshot(length) || length == end) add(length);
  std::ranges::sort(written_, {}, &StateAt::length);
  return {from, written_};
}

std::int64_t SequenceStates::end(std::int64_t num_computed) {
  for (; !written_.empty() && written_.back().length > num_computed; written_.pop_back())
    give_back(written_.back().record);
  if (written_.empty()) return std::clamp<std::int64_t>(length_, 0, std::max<std::int64_t>(num_computed, 0));
  const auto [length, record] = written_.back();
  written_.pop_back();
  if (own_ != kNone && lacks_snapshot_ && length_ > 0)
    written_.insert(written_.begin(), {length_, own_});
  else if (own_ != kNone)
    store_.release(own_);
  own_ = record;
  lacks_snapshot_ = shares_pages_ && length % block_size_ == 0 && (written_.empty() || written_.back().length < length);
  if (from_ != kNone) store_.release(from_);
  from_ = kNone;
  return length_ = length;
}

void SequenceStates::take_snapshots(std::span<const std::int32_t> pages) {
  for (const auto& [length, record] : written_) {
    const std::int64_t count = length / block_size_;
    if (length % block_size_ != 0 || count > std::ssize(pages)) {
      store_.release(record);
      continue;
    }
    const std::int32_t page = pages[static_cast<std::size_t>(count - 1)];
    const bool is_kept = leaves_snapshot(length);
    if (store_.attach(record, page, is_kept)) replace_tail(is_kept ? kNone : page, record);
  }
  written_.clear();
}

void SequenceStates::cancel() {
  for (const StateAt& state : written_) give_back(state.record);
  written_.clear();
}

void SequenceStates::fill(std::int64_t length) {
  if (own_ == kNone) throw std::logic_error("there is no record that could have been filled; reserve it first");
  if (from_ != kNone) store_.release(from_);
  from_ = kNone;
  length_ = length;
  lacks_snapshot_ = false;
}

void SequenceStates::leave(std::int32_t page) {
  store_.attach(own_, page, true);
  own_ = kNone;
  length_ = 0;
}

void SequenceStates::succeed(SequenceStates& other) {
  std::swap(branch_, other.branch_);
  std::swap(tail_page_, other.tail_page_);
  std::swap(tail_record_, other.tail_record_);
}

void SequenceStates::clear() {
  cancel();
  if (tail_page_ != kNone && store_.snapshot(tail_page_) == tail_record_) store_.log(tail_record_);
  tail_page_ = kNone;
  for (std::int32_t* record : {&own_, &from_})
    if (*record != kNone) {
      store_.release(*record);
      *record = kNone;
    }
  length_ = 0;
}

/// Returns true if the sequence leaves a snapshot at this page boundary wherever steps end.
bool SequenceStates::leaves_snapshot(std::int64_t length) const {
  const std::int64_t least = store_.shape().snapshot_pages * block_size_;
  return length == prompt_end_ || length == branch_ ||
         (least > 0 && length % least == 0 && std::has_single_bit(static_cast<std::uint64_t>(length / least)));
}

/// Gives back a record of the step; the sequence keeps one.
void SequenceStates::give_back(std::int32_t record) {
  if (own_ == kNone)
    own_ = record;
  else
    store_.release(record);
}

/// Drops the snapshot where a step ended before, unless a sequence has found it.
void SequenceStates::replace_tail(std::int32_t page, std::int32_t record) {
  if (tail_page_ != kNone && store_.snapshot(tail_page_) == tail_record_ && !store_.is_held(tail_record_))
    store_.detach(tail_page_);
  tail_page_ = page;
  tail_record_ = record;
}

}  // namespace quire
