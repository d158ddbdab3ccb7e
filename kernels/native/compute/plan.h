#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <vector>

#include "compute/thread_pool.h"

namespace quire {

/// The sizes of a step, in the order in which kernels read them.
enum class Dim { tokens, logit_rows, capacity, kv_tiles, entries, parts, splits, count };

using Dims = std::array<std::int64_t, static_cast<std::size_t>(Dim::count)>;
using Kernel = void (*)(void* const* buffers, const std::int64_t* dims, std::int64_t begin, std::int64_t end);

/// One kernel over its buffers. It has `times * ceil(dims[dim] / per)` work items; results never depend on which thread
/// computes which.
struct Launch {
  Kernel kernel;
  std::vector<void*> buffers;
  Dim dim;
  std::int64_t per = 1;
  std::int64_t times = 1;

  std::int64_t items(const Dims& dims) const { return times * ((dims[static_cast<std::size_t>(dim)] + per - 1) / per); }
};

/// A list of launches that run one after the other, each on all threads. Threads take a launch's items in chunks as
/// they come free, those of their own node's share first; the next launch begins when all items are done, whoever did
/// them. So a thread that the system holds up, or that has the costlier items, holds up the others by a chunk at most.
class Plan {
 public:
  Plan() = default;
  Plan(const Plan&) = delete;
  Plan& operator=(const Plan&) = delete;

  /// A kernel must not throw.
  void add(Launch launch);
  void run(ThreadPool& pool, const Dims& dims);

  /// Runs like `run`, but waits for all threads first; returns the seconds of each launch, from when the one before is
  /// done to when this is.
  std::vector<double> profile(ThreadPool& pool, const Dims& dims);

 private:
  template <class OnDone>
  void work(ThreadPool& pool, int thread, const Dims& dims, OnDone on_done);
  std::int64_t compute(const ThreadPool& pool, int thread, std::size_t launch, std::int64_t items, const Dims& dims);
  void reset(int nodes);

  std::vector<Launch> launches_;
  std::vector<std::atomic<std::int64_t>> taken_;  ///< per node and launch: items that threads have taken of its share
  std::vector<std::atomic<std::int64_t>> done_;   ///< per launch: items that are done
  Waitable finished_;                             ///< launches of which all items are done
};

}  // namespace quire
