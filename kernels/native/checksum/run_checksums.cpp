#include "checksum/run_checksums.h"

#include <atomic>
#include <cstddef>

#include "checksum/checksum.h"

namespace quire {

std::vector<std::uint64_t> checksums_of(Runs runs, ThreadPool& threads) {
  std::vector<std::uint64_t> hashes(runs.size());
  if (runs.empty()) return hashes;
  std::atomic<std::size_t> next{0};
  threads.run([&](int) {
    for (std::size_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < runs.size();)
      hashes[i] = checksum(runs[i]);
  });
  return hashes;
}

}  // namespace quire
