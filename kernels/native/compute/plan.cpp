#include "compute/plan.h"

#include <atomic>
#include <stdexcept>
#include <string>
#include <utility>

namespace quire {
namespace {

constexpr std::int64_t kMostRepeats = std::int64_t{1} << 31;
constexpr std::int64_t kMostGroups = std::int64_t{1} << 20;

}  // namespace

void Plan::add(Launch launch) {
  static std::atomic<std::uint64_t> last_version{0};
  if (!launch.kernel || launch.rows_per_item < 1 || launch.repeats < 1 || launch.repeats > kMostRepeats)
    throw std::invalid_argument(
        "a launch needs a kernel, rows_per_item >= 1 and repeats from 1 to " + std::to_string(kMostRepeats) +
        "; got rows_per_item=" + std::to_string(launch.rows_per_item) + ", repeats=" + std::to_string(launch.repeats));
  if (launch.copies < 1 || launch.copies > kMostGroups || launch.groups < 0 || launch.groups > kMostGroups)
    throw std::invalid_argument("a launch has copies from 1 and groups from 0 to " + std::to_string(kMostGroups) +
                                "; got copies=" + std::to_string(launch.copies) +
                                ", groups=" + std::to_string(launch.groups));
  launches_.push_back(std::move(launch));
  version_ = ++last_version;
}

}  // namespace quire
