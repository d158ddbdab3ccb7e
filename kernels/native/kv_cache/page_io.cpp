#include "kv_cache/page_io.h"

#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <limits>
#include <span>
#include <stdexcept>
#include <string>
#include <system_error>
#include <vector>

#include "checksum/checksum.h"

namespace quire {
namespace {

constexpr std::size_t kBytesAtOnce = std::size_t{1} << 18;  // stay in the L2 cache until they are hashed
constexpr std::size_t kRunsAtOnce = 512;                    // the system takes 1,024

std::string range_of_pages(const KvMemory& memory) {
  return "; the page must be from 0 to " + std::to_string(memory.shape().num_pages - 1);
}

bool has_page(const KvMemory& memory, std::int32_t page) { return page >= 0 && page < memory.shape().num_pages; }

void check_copy(const KvMemory& memory, std::int32_t page, std::size_t num_bytes) {
  if (!has_page(memory, page) || num_bytes != memory.page_bytes())
    throw std::invalid_argument("page " + std::to_string(page) + " and a copy of " + std::to_string(num_bytes) +
                                " bytes" + range_of_pages(memory) + ", and a copy has " +
                                std::to_string(memory.page_bytes()) + " bytes");
}

using Transfer = ssize_t (*)(int, const iovec*, int, off_t);

/// Transfers a page, some runs at a time; `then` is called for each run.
template <class Then>
void transfer(Transfer call, const KvMemory& memory, std::int32_t page, int descriptor, std::int64_t offset,
              const Then& then) {
  if (!has_page(memory, page) || offset < 0 ||
      offset > std::numeric_limits<std::int64_t>::max() - static_cast<std::int64_t>(memory.page_bytes()))
    throw std::invalid_argument("page " + std::to_string(page) + " at offset " + std::to_string(offset) + " of a file" +
                                range_of_pages(memory));
  const std::size_t at_once = std::clamp<std::size_t>(kBytesAtOnce / memory.run_bytes(), 1, kRunsAtOnce);
  std::vector<iovec> runs;
  for (std::int64_t run = 0; run < memory.runs_of_page();) {
    runs.clear();
    for (; runs.size() < at_once && run < memory.runs_of_page(); run++) {
      const std::span<std::byte> bytes = memory.run_of_page(page, run);
      runs.push_back({bytes.data(), bytes.size()});
    }
    const auto wanted = static_cast<ssize_t>(runs.size() * memory.run_bytes());
    const ssize_t done = call(descriptor, runs.data(), static_cast<int>(runs.size()), offset);
    if (done != wanted) throw std::system_error(done < 0 ? errno : EIO, std::generic_category());
    for (const iovec& bytes : runs) then(std::span(static_cast<const std::byte*>(bytes.iov_base), bytes.iov_len));
    offset += wanted;
  }
}

}  // namespace

void write_page(const KvMemory& memory, std::int32_t page, int descriptor, std::int64_t offset) {
  transfer(pwritev, memory, page, descriptor, offset, [](std::span<const std::byte>) {});
}

std::uint64_t read_page(const KvMemory& memory, std::int32_t page, int descriptor, std::int64_t offset) {
  std::vector<std::uint64_t> hashes;
  transfer(preadv, memory, page, descriptor, offset,
           [&](std::span<const std::byte> run) { hashes.push_back(checksum(run)); });
  return checksum(std::as_bytes(std::span(hashes)));
}

std::uint64_t copy_page(const KvMemory& memory, std::int32_t page, std::span<std::byte> copy) {
  check_copy(memory, page, copy.size());
  std::vector<std::uint64_t> hashes;
  for (std::int64_t run = 0; run < memory.runs_of_page(); run++, copy = copy.subspan(memory.run_bytes())) {
    std::memcpy(copy.data(), memory.run_of_page(page, run).data(), memory.run_bytes());
    hashes.push_back(checksum(copy.first(memory.run_bytes())));
  }
  return checksum(std::as_bytes(std::span(hashes)));
}

std::uint64_t fill_page(const KvMemory& memory, std::int32_t page, std::span<const std::byte> copy) {
  check_copy(memory, page, copy.size());
  std::vector<std::uint64_t> hashes;
  for (std::int64_t run = 0; run < memory.runs_of_page(); run++, copy = copy.subspan(memory.run_bytes())) {
    const std::span<std::byte> bytes = memory.run_of_page(page, run);
    std::memcpy(bytes.data(), copy.data(), bytes.size());
    hashes.push_back(checksum(bytes));
  }
  return checksum(std::as_bytes(std::span(hashes)));
}

}  // namespace quire
