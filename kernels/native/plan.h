#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <deque>
#include <vector>

#include "thread_pool.h"

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
/// they come free, so that one that the system holds up, or that has the costlier items, does not hold up the others.
class Plan {
 public:
  Plan() = default;
  Plan(const Plan&) = delete;
  Plan& operator=(const Plan&) = delete;

  void add(Launch launch);
  void run(ThreadPool& pool, const Dims& dims);

  /// Runs like `run`; returns the seconds of each launch, from when the last thread is done with the one before to when
  /// the last is done with this.
  std::vector<double> profile(ThreadPool& pool, const Dims& dims);

  std::size_t size() const { return launches_.size(); }

 private:
  void begin();
  bool take_items(std::size_t launch, int threads, const Dims& dims);

  std::vector<Launch> launches_;
  std::deque<std::atomic<std::int64_t>> next_;  ///< per launch: the first item that no thread has taken
};

}  // namespace quire
