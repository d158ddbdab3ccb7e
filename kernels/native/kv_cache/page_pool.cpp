#include "kv_cache/page_pool.h"

#include <algorithm>
#include <bit>
#include <stdexcept>
#include <string>

namespace quire {
namespace {

int size_class(std::int32_t length) { return std::bit_width(static_cast<std::uint32_t>(length)) - 1; }

std::int32_t checked(const char* name, std::int32_t pages) {
  if (pages < 1) throw std::invalid_argument(name + ("=" + std::to_string(pages)) + "; give at least 1");
  return pages;
}

}  // namespace

PagePool::PagePool(std::int32_t num_pages, std::int32_t extent)
    : references_(checked("num_pages", num_pages), 0),
      runs_(num_pages),
      free_(num_pages),
      extent_(checked("extent", extent)) {
  lists_.fill(kNone);
  commit(0);
}

bool PagePool::allocate(std::int32_t count, std::vector<std::int32_t>& pages) {
  if (count < 0) throw std::invalid_argument("count=" + std::to_string(count) + "; give 0 or more");
  if (count > free_) return false;
  commit(count);
  if (count > 0 && !pages.empty()) {
    check_held(pages.back(), "growth");  // so the next page is held, or the first of a free run
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
    // Start in the middle of the run: the sequence that ends just before it may need to grow, and so may this one.
    take(run, run == 0 ? 0 : run + (length - taken) / 2, taken, pages);
    count -= taken;
  }
  return true;
}

void PagePool::take_over(std::span<const std::int32_t> pages) {
  if (held_pages() > 0) throw std::logic_error("pages can be taken over only before others have been allocated");
  if (pages.empty()) return;
  remove_run(0);
  while (committed_ <= pages.back()) committed_ += std::min(extent_, total() - committed_);
  std::int32_t end = 0;  // end of the pages that are done
  for (std::int32_t page : pages) {
    if (page > end) add_run(end, page - end);
    references_[page] = 1;
    end = page + 1;
  }
  if (committed_ > end) add_run(end, committed_ - end);
  free_ -= static_cast<std::int32_t>(pages.size());
  commit(0);
}

void PagePool::retain(std::int32_t page) {
  check_held(page, "retain");
  ++references_[page];
}

void PagePool::release(std::int32_t page) {
  check_held(page, "release");
  if (--references_[page] > 0) return;
  ++free_;
  free_run(page, 1);
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

/// Commits extents until enough pages stay free after `count` are taken.
void PagePool::commit(std::int32_t count) {
  const std::int32_t begin = committed_;
  while (committed_ < total() && (committed_ == 0 || committed_ - held_pages() - count < committed_ / 2))
    committed_ += std::min(extent_, total() - committed_);
  if (committed_ > begin) free_run(begin, committed_ - begin);
}

/// Adds pages to the free runs, merged with adjacent ones.
void PagePool::free_run(std::int32_t first, std::int32_t length) {
  if (const std::int32_t end = first + length; end < total() && runs_[end].length > 0) {
    length += runs_[end].length;
    remove_run(end);
  }
  if (first > 0 && runs_[first - 1].length > 0) {
    const std::int32_t before = runs_[first - 1].length;
    first -= before;
    length += before;
    remove_run(first);
  }
  add_run(first, length);
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

/// Returns a run of the largest nonempty size class: at least half as long as the longest.
std::int32_t PagePool::longest_run() const { return lists_[std::bit_width(nonempty_) - 1]; }

/// Takes pages [first, first + count) from the free run that starts at `run`.
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
