#pragma once

#include <cstdint>
#include <vector>

#include "compute/device.h"

namespace quire {

/// Returns the checksum of each run of a device's memory. All threads take part.
std::vector<std::uint64_t> checksums_of(const Device& device, Runs runs);

}  // namespace quire
