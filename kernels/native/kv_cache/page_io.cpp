#include "kv_cache/page_io.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <vector>

#include "checksum/checksum.h"

namespace quire {
namespace {

void check(const KvMemory& memory, std::int32_t page, std::size_t num_bytes) {
  if (page < 0 || page >= memory.shape().num_pages || num_bytes != memory.page_bytes())
    throw std::invalid_argument("page " + std::to_string(page) + " and a copy of " + std::to_string(num_bytes) +
                                " bytes; the page must be from 0 to " + std::to_string(memory.shape().num_pages - 1) +
                                ", and a copy has " + std::to_string(memory.page_bytes()) + " bytes");
}

std::vector<std::span<std::byte>> runs_of(const KvMemory& memory, std::int32_t page) {
  std::vector<std::span<std::byte>> runs;
  for (std::int64_t run = 0; run < memory.runs_of_page(); run++) runs.push_back(memory.run_of_page(page, run));
  return runs;
}

}  // namespace

std::uint64_t copy_page(const KvMemory& memory, std::int32_t page, std::span<std::byte> copy) {
  check(memory, page, copy.size());
  std::vector<std::uint64_t> hashes;
  memory.device().read(runs_of(memory, page), [&](std::size_t, Runs host) {
    for (const std::span<const std::byte> run : host) {
      std::ranges::copy(run, copy.begin());
      hashes.push_back(checksum(copy.first(run.size())));
      copy = copy.subspan(run.size());
    }
  });
  return checksum(std::as_bytes(std::span(hashes)));
}

std::uint64_t fill_page(const KvMemory& memory, std::int32_t page, std::span<const std::byte> copy) {
  check(memory, page, copy.size());
  std::vector<std::uint64_t> hashes;
  memory.device().write(runs_of(memory, page), [&](std::size_t, Runs host) {
    for (const std::span<std::byte> run : host) {
      std::ranges::copy(copy.first(run.size()), run.begin());
      hashes.push_back(checksum(copy.first(run.size())));
      copy = copy.subspan(run.size());
    }
  });
  return checksum(std::as_bytes(std::span(hashes)));
}

}  // namespace quire
