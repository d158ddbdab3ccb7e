#include "page_pool.h"

#include <algorithm>
#include <bit>
#include <stdexcept>
#include <string>

namespace quire {
namespace {

int size_class(std::int32_t length) { return std::bit_width(static_cast<std::uint32_t>(length)) - 1; }

std::int32_t checked(std::int32_t num_pages) {
  if (num_pages < 1)
    throw std::invalid_argument("num_pages=" + std::to_string(num_pages) + "; a pool needs at least 1");
  return num_pages;
}

}  // namespace

PagePool::PagePool(std::int32_t num_pages) : references_(checked(num_pages), 0), runs_(num_pages), free_(num_pages) {
  lists_.fill(kNone);
  add_run(0, num_pages);
}

bool PagePool::allocate(std::int32_t count, std::vector<std::int32_t>& pages) {
  if (count < 0) throw std::invalid_argument("count=" + std::to_string(count) + " pages; it must not be negative");
  if (count > free_) return false;
  if (count > 0 && !pages.empty()) {
    check_held(pages.back(), "growth");  // so the page after it is the first of a free run, or not free
    const std::int32_t next = pages.back() + 1;
    if (next < total() && runs_[next].length > 0) {
      const std::int32_t taken = std::min(count, runs_[next].length);
      take(next, next, taken, pages);
      count -= taken;
    }
  }
  while (count > 0) {
    const std::int32_t run = longest_run();
    const std::int32_t length = runs_[run].length;
    const std::int32_t taken = std::min(count, length);
    // Whoever ends just before this run may want to grow: start in its middle, to leave room before and behind.
    take(run, run == 0 ? 0 : run + (length - taken) / 2, taken, pages);
    count -= taken;
  }
  return true;
}

void PagePool::retain(std::int32_t page) {
  check_held(page, "retain");
  ++references_[page];
}

void PagePool::release(std::int32_t page) {
  check_held(page, "release");
  if (--references_[page] > 0) return;
  ++free_;
  std::int32_t first = page, length = 1;
  if (page > 0 && runs_[page - 1].length > 0) {
    length += runs_[page - 1].length;
    first = page - runs_[page - 1].length;
    remove_run(first);
  }
  if (page + 1 < total() && runs_[page + 1].length > 0) {
    length += runs_[page + 1].length;
    remove_run(page + 1);
  }
  add_run(first, length);
}

std::int32_t PagePool::references(std::int32_t page) const {
  if (page < 0 || page >= total()) {
    throw std::invalid_argument("page " + std::to_string(page) + " does not exist; pages are 0 to " +
                                std::to_string(total() - 1));
  }
  return references_[page];
}

void PagePool::check_held(std::int32_t page, const char* operation) const {
  if (references(page) == 0) {
    throw std::logic_error(std::string(operation) + " of page " + std::to_string(page) + ", which is free");
  }
}

void PagePool::add_run(std::int32_t first, std::int32_t length) {
  const int list = size_class(length);
  const std::int32_t head = lists_[list];
  runs_[first + length - 1].length = length;
  runs_[first] = {.length = length, .next = head, .previous = kNone};
  if (head != kNone) runs_[head].previous = first;
  lists_[list] = first;
  nonempty_ |= 1u << list;
}

void PagePool::remove_run(std::int32_t first) {
  const Run run = runs_[first];
  const int list = size_class(run.length);
  if (run.next != kNone) runs_[run.next].previous = run.previous;
  if (run.previous != kNone) {
    runs_[run.previous].next = run.next;
  } else {
    lists_[list] = run.next;
    if (run.next == kNone) nonempty_ &= ~(1u << list);
  }
  runs_[first + run.length - 1].length = 0;
  runs_[first].length = 0;
}

/// A run of the highest class in use: at least half as long as the longest.
std::int32_t PagePool::longest_run() const { return lists_[std::bit_width(nonempty_) - 1]; }

/// Cuts pages [first, first + count) out of the free run that starts at `run`.
void PagePool::take(std::int32_t run, std::int32_t first, std::int32_t count, std::vector<std::int32_t>& pages) {
  const std::int32_t before = first - run;
  const std::int32_t after = runs_[run].length - before - count;
  remove_run(run);
  if (before > 0) add_run(run, before);
  if (after > 0) add_run(first + count, after);
  for (std::int32_t page = first; page < first + count; ++page) {
    references_[page] = 1;
    pages.push_back(page);
  }
  free_ -= count;
}

}  // namespace quire
