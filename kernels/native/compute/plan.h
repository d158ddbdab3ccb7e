#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <vector>

#include "compute/abi.h"
#include "compute/thread_pool.h"

namespace quire {

/// A kernel over its buffers, of `repeats * ceil(dims[dim] / rows_per_item)` work items. Results never depend on which
/// thread computes an item.
///
/// With `groups`, `copies * dims[dim]` rows are divided among that many groups, and each group into parts of up to
/// rows_per_item rows. Only the step decides how, so there are items for as many parts as this can give.
struct Launch {
  Kernel kernel;
  std::vector<void*> buffers;
  Dim dim;
  std::int64_t rows_per_item = 1;
  std::int64_t repeats = 1;
  std::int64_t copies = 1;
  std::int64_t groups = 0;

  std::int64_t items(const Dims& dims) const {
    const std::int64_t rows = copies * dims[static_cast<std::size_t>(dim)];
    if (groups > 0) return repeats * (std::min(rows, groups) + rows / rows_per_item);
    return repeats * ((rows + rows_per_item - 1) / rows_per_item);
  }
};

/// Launches that run one after the other, each on all threads. Idle threads take the items of a launch in chunks, from
/// their own NUMA node's share first; the next launch begins when all items are done. So a thread that is descheduled,
/// or that has the most expensive items, delays the others by one chunk at most.
class Plan {
 public:
  Plan() = default;
  Plan(const Plan&) = delete;
  Plan& operator=(const Plan&) = delete;

  /// The kernel must not throw. Throws std::invalid_argument for a launch without a kernel or items.
  void add(Launch launch);
  void run(ThreadPool& pool, const Dims& dims);

  /// Runs the launches once all threads have arrived. Returns the seconds of each, from the end of the one before.
  std::vector<double> profile(ThreadPool& pool, const Dims& dims);

 private:
  template <class OnDone>
  void work(ThreadPool& pool, int thread, const Dims& dims, OnDone on_done);
  std::int64_t compute(const ThreadPool& pool, int thread, std::size_t launch, std::int64_t items, const Dims& dims);
  void reset(int nodes);

  std::vector<Launch> launches_;
  std::vector<std::atomic<std::int64_t>> taken_;  ///< per node and launch: items taken from its share
  std::vector<std::atomic<std::int64_t>> done_;   ///< per launch: finished items
  Waitable finished_;                             ///< number of finished launches
};

}  // namespace quire
