#include "kv_cache/sealed_pages.h"

#include <algorithm>

namespace quire {

std::uint64_t Seals::set(std::int32_t page) {
  std::atomic<std::uint64_t>& seal = seals_.at(static_cast<std::size_t>(page));
  if (seal.load(std::memory_order_relaxed) == 0) seal.store(++last_, std::memory_order_release);
  return seal.load(std::memory_order_relaxed);
}

void Seals::remove(std::int32_t page) {
  seals_.at(static_cast<std::size_t>(page)).store(0, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_release);  // orders this before any write to the page
}

bool Seals::holds(std::int32_t page, std::uint64_t seal) const {
  std::atomic_thread_fence(std::memory_order_acquire);  // orders all that was read of the page before this
  const auto place = static_cast<std::size_t>(page);
  return page >= 0 && place < seals_.size() && seal != 0 && seals_[place].load(std::memory_order_relaxed) == seal;
}

void SealedQueue::add(const SealedPage& page) {
  {
    const std::lock_guard lock(mutex_);
    if (pages_.size() == capacity_) {
      pages_.pop_front();
      num_left_out_++;
    }
    pages_.push_back(page);
  }
  added_.notify_one();
}

std::vector<SealedPage> SealedQueue::take(std::size_t most, std::chrono::duration<double> patience) {
  std::unique_lock lock(mutex_);
  added_.wait_for(lock, patience, [&] { return !pages_.empty(); });
  const auto end = pages_.begin() + static_cast<std::ptrdiff_t>(std::min(most, pages_.size()));
  std::vector<SealedPage> taken(pages_.begin(), end);
  pages_.erase(pages_.begin(), end);
  return taken;
}

std::int64_t SealedQueue::num_left_out() const {
  const std::lock_guard lock(mutex_);
  return num_left_out_;
}

}  // namespace quire
