#include "plan.h"

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <string>

namespace quire {
namespace {

constexpr std::int64_t kChunksPerThread = 8;

}  // namespace

void Plan::add(Launch launch) {
  if (!launch.kernel || launch.per < 1 || launch.times < 1)
    throw std::invalid_argument("a launch needs a kernel, per >= 1 and times >= 1; got per=" +
                                std::to_string(launch.per) + ", times=" + std::to_string(launch.times));
  launches_.push_back(std::move(launch));
  next_.emplace_back(0);
}

void Plan::begin() {
  for (auto& next : next_) next.store(0, std::memory_order_relaxed);
}

/// One thread's share of a launch; false if the launch has no items.
bool Plan::take_items(std::size_t number, int threads, const Dims& dims) {
  const Launch& launch = launches_[number];
  const std::int64_t items = launch.items(dims);
  if (items == 0) return false;
  const std::int64_t chunk = std::max<std::int64_t>(1, items / (threads * kChunksPerThread));
  for (std::int64_t begin; (begin = next_[number].fetch_add(chunk, std::memory_order_relaxed)) < items;)
    launch.kernel(launch.buffers.data(), dims.data(), begin, std::min(begin + chunk, items));
  return true;
}

void Plan::run(ThreadPool& pool, const Dims& dims) {
  begin();
  pool.run([&](int thread) {
    for (std::size_t i = 0; i < launches_.size(); i++) {
      if (take_items(i, pool.size(), dims)) pool.barrier(thread);
    }
  });
}

std::vector<double> Plan::profile(ThreadPool& pool, const Dims& dims) {
  using Clock = std::chrono::steady_clock;
  const std::size_t count = launches_.size();
  // Each thread's times of coming to the barriers. What one thread sees after a barrier would not do: the system may
  // hold it up there while the others compute the next launch.
  std::vector<std::vector<Clock::time_point>> ends(static_cast<std::size_t>(pool.size()),
                                                   std::vector<Clock::time_point>(count + 1));
  begin();
  pool.run([&](int thread) {
    auto& own = ends[static_cast<std::size_t>(thread)];
    own[0] = Clock::now();
    pool.barrier(thread);
    for (std::size_t i = 0; i < count; i++) {
      const bool any = take_items(i, pool.size(), dims);
      own[i + 1] = Clock::now();
      if (any) pool.barrier(thread);
    }
  });
  std::vector<double> seconds(count);
  for (std::size_t i = 0; i <= count; i++) {
    for (const auto& other : ends) ends[0][i] = std::max(ends[0][i], other[i]);
    if (i > 0) seconds[i - 1] = std::chrono::duration<double>(ends[0][i] - ends[0][i - 1]).count();
  }
  return seconds;
}

}  // namespace quire
