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
template <class Transfer>
void transfer_all(std::span<std::byte> bytes, std::uint64_t offset, Transfer transfer) {
  while (!bytes.empty()) {
    const ssize_t count = transfer(bytes, static_cast<off_t>(offset));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) throw std::system_error(errno, std::generic_category());
    if (count == 0) throw std::system_error(EIO, std::generic_category(), "the file ends early");
    bytes = bytes.subspan(static_cast<std::size_t>(count));
    offset += static_cast<std::uint64_t>(count);
  }
}

/// Returns what a device calls with blocks, which begin at `offset` in the file: it transfers them, and sets the
/// checksum of each.
template <class Transfer>
UseRuns for_each_block(ThreadPool& pool, std::uint64_t offset, std::vector<std::uint64_t>& hashes, Transfer transfer) {
  return [=, &pool, &hashes](std::size_t first, Runs host) {
    std::atomic<std::size_t> next{0};
    pool.run([&](int) {
      for (std::size_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < host.size();) {
        transfer_all(host[i], offset + (first + i) * kChecksumBlock, transfer);
        hashes[first + i] = checksum(host[i]);
      }
    });
  };
}

}  // namespace

std::uint64_t read_part(const Device& device, int descriptor, std::uint64_t offset, std::span<std::byte> memory) {
  const std::vector<std::span<std::byte>> blocks = split(memory, kChecksumBlock);
  std::vector<std::uint64_t> hashes(blocks.size());
  const auto transfer = [=](std::span<std::byte> bytes, off_t at) {
    return pread(descriptor, bytes.data(), bytes.size(), at);
  };
  device.write(blocks, for_each_block(device.threads(), offset, hashes, transfer));
  return checksum(std::as_bytes(std::span(hashes)));
}

std::uint64_t write_part(const Device& device, int descriptor, std::uint64_t offset, std::span<std::byte> memory) {
  const std::vector<std::span<std::byte>> blocks = split(memory, kChecksumBlock);
  std::vector<std::uint64_t> hashes(blocks.size());
  const auto transfer = [=](std::span<std::byte> bytes, off_t at) {
    return pwrite(descriptor, bytes.data(), bytes.size(), at);
  };
  device.read(blocks, for_each_block(device.threads(), offset, hashes, transfer));
  return checksum(std::as_bytes(std::span(hashes)));
}

}  // namespace quire
