#include "kv_cache/page_io.h"

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

}  // namespace

std::uint64_t copy_page(const KvMemory& memory, std::int32_t page, std::span<std::byte> copy) {
  check(memory, page, copy.size());
  std::vector<std::uint64_t> hashes;
  for (std::int64_t number = 0; number < memory.runs_of_page(); number++) {
    const auto run = memory.run_of_page(page, number);
    memory.device().copy(copy.data(), run.data(), {run.size()});
    hashes.push_back(checksum(copy.first(run.size())));
    copy = copy.subspan(run.size());
  }
  return checksum(std::as_bytes(std::span(hashes)));
}

std::uint64_t fill_page(const KvMemory& memory, std::int32_t page, std::span<const std::byte> copy) {
  check(memory, page, copy.size());
  std::vector<std::uint64_t> hashes;
  for (std::int64_t number = 0; number < memory.runs_of_page(); number++) {
    const auto run = memory.run_of_page(page, number);
    memory.device().copy(run.data(), copy.data(), {run.size()});
    hashes.push_back(checksum(copy.first(run.size())));
    copy = copy.subspan(run.size());
  }
  return checksum(std::as_bytes(std::span(hashes)));
}

}  // namespace quire
