#include "checksum/checked_file.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <system_error>
#include <vector>

#include "checksum/checksum.h"

namespace quire {
namespace {

/// Calls transfer(bytes, offset), which returns how many it has transferred, until all are.
template <class Byte, class Transfer>
void transfer_all(std::span<Byte> bytes, std::uint64_t offset, Transfer transfer) {
  while (!bytes.empty()) {
    const ssize_t count = transfer(bytes, static_cast<off_t>(offset));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) throw std::system_error(errno, std::generic_category());
    if (count == 0) throw std::system_error(EIO, std::generic_category(), "the file ends early");
    bytes = bytes.subspan(static_cast<std::size_t>(count));
    offset += static_cast<std::uint64_t>(count);
  }
}

template <class Byte, class Transfer>
std::uint64_t for_each_block(ThreadPool& pool, std::uint64_t offset, std::span<Byte> memory, Transfer transfer) {
  std::vector<std::uint64_t> hashes((memory.size() + kChecksumBlock - 1) / kChecksumBlock);
  std::atomic<std::size_t> next{0};
  pool.run([&](int) {
    for (std::size_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < hashes.size();) {
      const std::size_t begin = i * kChecksumBlock;
      const std::span<Byte> block = memory.subspan(begin, std::min(kChecksumBlock, memory.size() - begin));
      transfer_all(block, offset + begin, transfer);
      hashes[i] = checksum(block);
    }
  });
  return checksum(std::as_bytes(std::span(hashes)));
}

}  // namespace

std::uint64_t read_part(ThreadPool& pool, int descriptor, std::uint64_t offset, std::span<std::byte> memory) {
  return for_each_block(pool, offset, memory, [&](std::span<std::byte> bytes, off_t at) {
    return pread(descriptor, bytes.data(), bytes.size(), at);
  });
}

std::uint64_t write_part(ThreadPool& pool, int descriptor, std::uint64_t offset, std::span<const std::byte> memory) {
  return for_each_block(pool, offset, memory, [&](std::span<const std::byte> bytes, off_t at) {
    return pwrite(descriptor, bytes.data(), bytes.size(), at);
  });
}

}  // namespace quire
