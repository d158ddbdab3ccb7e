#include "speculation/token_index.h"

#include <algorithm>
#include <array>
#include <bit>
#include <limits>
#include <stdexcept>
#include <string>

namespace quire {
namespace {

constexpr std::size_t kFirstSize = 64;
constexpr std::int32_t kLongestRun = 64;

}  // namespace

TokenIndex::TokenIndex(std::int32_t run, std::int64_t capacity)
    : run_(run),
      capacity_(
          static_cast<std::int64_t>(std::bit_ceil(static_cast<std::uint64_t>(std::max<std::int64_t>(capacity, 1))))),
      tokens_(std::min(kFirstSize, static_cast<std::size_t>(capacity_))),
      earlier_(tokens_.size()),
      latest_(tokens_.size()) {
  if (run < 1 || run > kLongestRun || capacity < run)
    throw std::invalid_argument("an index of " + std::to_string(capacity) + " tokens by runs of " +
                                std::to_string(run) + "; give runs of 1 to " + std::to_string(kLongestRun) +
                                ", and at least as many tokens");
}

std::size_t TokenIndex::bucket(std::span<const std::int32_t> run) const {
  std::uint64_t hash = 0;
  for (const std::int32_t token : run) hash = (hash ^ static_cast<std::uint32_t>(token)) * 0x9e3779b97f4a7c15u;
  return (hash ^ hash >> 32) & (latest_.size() - 1);
}

void TokenIndex::forget_before(Place place) { first_ = std::max(first_, place); }

std::int32_t TokenIndex::token(Place place) const {
  return place < first_ || place >= end_ ? kNone : tokens_[at(place)];
}

void TokenIndex::append(std::int32_t token) {
  if (end_ - first_ == std::ssize(tokens_)) {
    if (std::ssize(tokens_) < capacity_)
      grow();
    else
      first_++;
  }
  tokens_[at(end_++)] = token;
  text_ = std::max(text_, first_);
  if (token != kNone) link(end_);
}

void TokenIndex::end_text() {
  append(kNone);
  text_ = end_;
}

/// Puts the run that ends before `end` first in its chain.
void TokenIndex::link(Place end) {
  if (end - text_ < run_) return;
  std::array<std::int32_t, kLongestRun> run;
  for (std::int32_t i = 0; i < run_; i++) run[static_cast<std::size_t>(i)] = tokens_[at(end - run_ + i)];
  Place& latest = latest_[bucket(std::span(run).first(static_cast<std::size_t>(run_)))];
  const Place distance = end - latest;
  const bool reaches = latest > first_ && distance <= std::numeric_limits<std::int32_t>::max();
  earlier_[at(end - 1)] = reaches ? static_cast<std::int32_t>(distance) : kNoLink;
  latest = end;
}

/// Doubles the memory. All runs are linked anew.
void TokenIndex::grow() {
  std::vector<std::int32_t> tokens(2 * tokens_.size());
  for (Place place = first_; place < end_; place++)
    tokens[static_cast<std::size_t>(place) & (tokens.size() - 1)] = token(place);
  tokens_ = std::move(tokens);
  earlier_.assign(tokens_.size(), kNoLink);
  latest_.assign(tokens_.size(), 0);
  const Place text = text_;
  text_ = first_;
  for (Place place = first_; place < end_; place++) {
    if (token(place) == kNone)
      text_ = place + 1;
    else
      link(place + 1);
  }
  text_ = text;
}

void TokenIndex::find(std::span<const std::int32_t> sequence, std::int32_t longest, std::int32_t most_places,
                      std::vector<Match>& found) const {
  found.clear();
  if (std::ssize(sequence) < run_) return;
  const std::size_t size = sequence.size();
  Place place = latest_[bucket(sequence.last(static_cast<std::size_t>(run_)))];
  for (std::int32_t i = 0; i < most_places && place > first_ && place <= end_; i++) {
    std::int32_t length = 0;
    while (length < longest && static_cast<std::size_t>(length) < size &&
           token(place - 1 - length) == sequence[size - 1 - static_cast<std::size_t>(length)])
      length++;
    const bool goes_on = token(place) != kNone;
    if (length >= run_ && goes_on) {
      if (!found.empty() && length > found.front().length) found.clear();
      if (found.empty() || length == found.front().length) found.push_back({place, length});
    }
    const std::int32_t distance = earlier_[at(place - 1)];
    if (distance == kNoLink) break;
    place -= distance;
  }
}

}  // namespace quire
