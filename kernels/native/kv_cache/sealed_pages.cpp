#include "kv_cache/sealed_pages.h"

#include <algorithm>

namespace quire {

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
