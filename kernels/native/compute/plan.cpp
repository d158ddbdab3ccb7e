#include "compute/plan.h"

#include <algorithm>
#include <chrono>
#include <latch>
#include <stdexcept>
#include <string>
#include <utility>

namespace quire {
namespace {

constexpr std::int64_t kChunksPerThread = 8;
constexpr std::int64_t kMostRepeats = std::int64_t{1} << 31;
constexpr std::int64_t kMostGroups = std::int64_t{1} << 20;

}  // namespace

void Plan::add(Launch launch) {
  if (!launch.kernel || launch.rows_per_item < 1 || launch.repeats < 1 || launch.repeats > kMostRepeats)
    throw std::invalid_argument(
        "a launch needs a kernel, rows_per_item >= 1 and repeats from 1 to " + std::to_string(kMostRepeats) +
        "; got rows_per_item=" + std::to_string(launch.rows_per_item) + ", repeats=" + std::to_string(launch.repeats));
  if (launch.copies < 1 || launch.copies > kMostGroups || launch.groups < 0 || launch.groups > kMostGroups)
    throw std::invalid_argument("a launch has copies from 1 and groups from 0 to " + std::to_string(kMostGroups) +
                                "; got copies=" + std::to_string(launch.copies) +
                                ", groups=" + std::to_string(launch.groups));
  launches_.push_back(std::move(launch));
}

void Plan::reset(int nodes) {
  const std::size_t shares = static_cast<std::size_t>(nodes) * launches_.size();
  if (taken_.size() != shares) taken_ = std::vector<std::atomic<std::int64_t>>(shares);
  if (done_.size() != launches_.size()) done_ = std::vector<std::atomic<std::int64_t>>(launches_.size());
  for (auto& taken : taken_) taken.store(0, std::memory_order_relaxed);
  for (auto& done : done_) done.store(0, std::memory_order_relaxed);
  finished_.reset(0);
}

/// Does one thread's share of the plan. The thread that finishes the last item of launch i calls on_done(i).
template <class OnDone>
void Plan::work(ThreadPool& pool, int thread, const Dims& dims, OnDone on_done) {
  const auto count = static_cast<std::uint32_t>(launches_.size());
  for (std::uint32_t i = finished_.load(); i < count; i++) {  // a late thread joins the current launch
    const std::int64_t items = launches_[i].items(dims);
    if (items == 0) continue;
    const std::int64_t computed = compute(pool, thread, i, items, dims);
    if (computed && done_[i].fetch_add(computed, std::memory_order_acq_rel) + computed == items) {
      on_done(i);
      finished_.store(i + 1);
    } else {
      for (std::uint32_t seen; (seen = finished_.load()) <= i;) pool.wait_while(finished_, seen);
    }
  }
}

void Plan::run(ThreadPool& pool, const Dims& dims) {
  reset(pool.nodes());
  pool.run([&](int thread) { work(pool, thread, dims, [](std::size_t) {}); });
}

std::vector<double> Plan::profile(ThreadPool& pool, const Dims& dims) {
  using Clock = std::chrono::steady_clock;
  std::vector<Clock::time_point> begins(static_cast<std::size_t>(pool.size())), ends(launches_.size());
  std::latch all_here(pool.size());
  reset(pool.nodes());
  pool.run([&](int thread) {
    all_here.arrive_and_wait();
    begins[static_cast<std::size_t>(thread)] = Clock::now();
    work(pool, thread, dims, [&](std::size_t launch) { ends[launch] = Clock::now(); });
  });
  std::vector<double> seconds;
  Clock::time_point last = *std::ranges::min_element(begins);
  for (const Clock::time_point end : ends) {
    const Clock::time_point done = std::max(last, end);  // a launch without items has no end
    seconds.push_back(std::chrono::duration<double>(done - std::exchange(last, done)).count());
  }
  return seconds;
}

/// Computes chunks of a launch until none is left. Returns the number of items computed.
std::int64_t Plan::compute(const ThreadPool& pool, int thread, std::size_t launch, std::int64_t items,
                           const Dims& dims) {
  const Kernel kernel = launches_[launch].kernel;
  const std::vector<void*>& buffers = launches_[launch].buffers;
  const std::int64_t chunk = std::max<std::int64_t>(1, items / (pool.size() * kChunksPerThread));
  std::int64_t computed = 0;
  for (int i = 0, node = pool.place(thread).node; i < pool.nodes();
       i++, node = node + 1 == pool.nodes() ? 0 : node + 1) {
    const std::int64_t first = pool.share_begin(node, items), end = pool.share_begin(node + 1, items);
    auto& taken = taken_[static_cast<std::size_t>(node) * launches_.size() + launch];
    for (std::int64_t begin; (begin = first + taken.fetch_add(chunk, std::memory_order_relaxed)) < end;) {
      const std::int64_t chunk_end = std::min(begin + chunk, end);
      kernel(buffers.data(), dims.data(), begin, chunk_end);
      computed += chunk_end - begin;
    }
  }
  return computed;
}

}  // namespace quire
