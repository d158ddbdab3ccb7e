#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "compute/abi.h"

namespace quire {

/// A kernel over its buffers, of `repeats * ceil(dims[dim] / rows_per_item)` work items. Results never depend on which
/// thread computes an item.
///
/// With `groups`, `copies * dims[dim]` rows are divided among that many groups, and each group into parts of up to
/// rows_per_item rows. Only the step decides how, so there are items for as many parts as this can give.
struct Launch {
  std::uintptr_t kernel;  ///< kernel as the device has compiled it; for a CPU the address of a Kernel
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

/// Launches that run one after the other: see Device::run.
class Plan {
 public:
  /// The kernel must not throw. Throws std::invalid_argument for a launch without a kernel or items.
  void add(Launch launch);
  std::span<const Launch> launches() const { return launches_; }

  /// Returns a number that no plan with other launches has.
  std::uint64_t version() const { return version_; }

 private:
  std::vector<Launch> launches_;
  std::uint64_t version_ = 0;  ///< of a plan without launches
};

}  // namespace quire
