#pragma once

#include <cstdint>
#include <vector>

#include "compute/device.h"

namespace quire {

/// Returns the checksum of each run of the host's memory. All threads take part.
std::vector<std::uint64_t> checksums_of(Runs runs, ThreadPool& threads);

}  // namespace quire
