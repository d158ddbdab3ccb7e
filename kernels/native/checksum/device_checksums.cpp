#include "checksum/device_checksums.h"

#include <atomic>
#include <cstddef>

#include "checksum/checksum.h"

namespace quire {

std::vector<std::uint64_t> checksums_of(const Device& device, Runs runs) {
  std::vector<std::uint64_t> hashes(runs.size());
  if (runs.empty()) return hashes;
  device.read(runs, [&](std::size_t first, Runs host) {
    std::atomic<std::size_t> next{0};
    device.threads().run([&](int) {
      for (std::size_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < host.size();)
        hashes[first + i] = checksum(host[i]);
    });
  });
  return hashes;
}

}  // namespace quire
