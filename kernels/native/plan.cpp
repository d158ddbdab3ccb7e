#include "plan.h"

#include <algorithm>
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

void Plan::run(ThreadPool& pool, const Dims& dims) {
  for (auto& next : next_) next.store(0, std::memory_order_relaxed);
  pool.run([&](int thread) {
    for (std::size_t i = 0; i < launches_.size(); i++) {
      const Launch& launch = launches_[i];
      const std::int64_t items = launch.items(dims);
      if (items == 0) continue;
      const std::int64_t chunk = std::max<std::int64_t>(1, items / (pool.size() * kChunksPerThread));
      for (std::int64_t begin; (begin = next_[i].fetch_add(chunk, std::memory_order_relaxed)) < items;)
        launch.kernel(launch.buffers.data(), dims.data(), begin, std::min(begin + chunk, items));
      pool.barrier(thread);
    }
  });
}

}  // namespace quire
