#include "compute/arena.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <latch>
#include <stdexcept>
#include <string>

#include "compute/abi.h"

namespace quire {
namespace {

constexpr std::size_t kPage = 4096;
constexpr int kCollapse = 25;                             // MADV_COLLAPSE of Linux 6.1, which older headers lack
constexpr std::size_t kMostBytes = std::size_t{1} << 56;  // beyond every address space; sums with it don't overflow

std::size_t round_up(std::size_t value, std::size_t multiple) { return (value + multiple - 1) / multiple * multiple; }

}  // namespace

void Arena::Unmap::operator()(std::byte* address) const { munmap(address, bytes); }

std::byte* Arena::map(std::size_t bytes) {
  const std::size_t whole = bytes + kHugePage;  // room to align
  void* address = mmap(nullptr, whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (address == MAP_FAILED) throw OutOfMemory(bytes);
  mappings_.emplace_back(static_cast<std::byte*>(address), Unmap{whole});
  auto aligned = reinterpret_cast<std::byte*>(round_up(reinterpret_cast<std::uintptr_t>(address), kHugePage));
  if (bytes >= kHugePage) madvise(aligned, bytes, MADV_HUGEPAGE);  // only a hint
  return aligned;
}

void* Arena::allocate(std::size_t bytes) {
  if (bytes > kMostBytes) throw OutOfMemory(bytes);
  bytes = round_up(std::max(bytes, std::size_t{1}), std::size_t{kCacheLine});  // an address of its own
  if (bytes >= kHugePage) return map(bytes);
  if (bytes > left_) {
    free_ = map(kHugePage);
    left_ = kHugePage;
  }
  std::byte* address = free_;
  free_ += bytes;
  left_ -= bytes;
  return address;
}

void Arena::check(const void* address, std::size_t bytes) const {
  const bool is_mapped = std::ranges::any_of(mappings_, [&](const Mapping& mapping) {
    return lies_within(address, bytes, {mapping.get(), mapping.get_deleter().bytes});
  });
  if (!is_mapped)
    throw std::invalid_argument(std::to_string(bytes) + " bytes at address " +
                                std::to_string(reinterpret_cast<std::uintptr_t>(address)) +
                                " are not memory that was allocated here");
}

bool lies_within(const void* address, std::size_t bytes, std::span<const std::byte> memory) {
  const auto begin = reinterpret_cast<std::uintptr_t>(address), first = reinterpret_cast<std::uintptr_t>(memory.data());
  return begin >= first && begin - first <= memory.size() && bytes <= memory.size() - (begin - first);
}

void touch_pages(std::byte* begin, std::byte* end) {
  if (begin >= end) return;
  begin -= reinterpret_cast<std::uintptr_t>(begin) % kPage;
#if defined(MADV_POPULATE_WRITE)
  if (madvise(begin, static_cast<std::size_t>(end - begin), MADV_POPULATE_WRITE) == 0) return;
#endif
  for (; begin < end; begin += kPage)  // kernels before Linux 5.14
    __atomic_fetch_add(reinterpret_cast<std::uint8_t*>(begin), 0, __ATOMIC_RELAXED);
}

void read_pages(std::span<const std::byte> memory) {
#if defined(MADV_POPULATE_READ)
  madvise(const_cast<std::byte*>(memory.data()), memory.size(), MADV_POPULATE_READ);  // only a hint
#else
  static_cast<void>(memory);  // they become resident as they are read
#endif
}

void touch_huge_pages(std::byte* begin, std::byte* end) {
  if (begin >= end) return;
  std::byte* const first = begin - reinterpret_cast<std::uintptr_t>(begin) % kHugePage;
  for (std::byte* page = first; page < end; page += kHugePage)  // one resident byte is enough
    touch_pages(std::max(page, begin), std::max(page, begin) + 1);
  madvise(first, round_up(static_cast<std::size_t>(end - first), kHugePage), kCollapse);  // only a hint
  touch_pages(begin, end);
}

void touch_by_node(ThreadPool& pool, std::byte* memory, std::size_t bytes, void (*touch)(std::byte*, std::byte*)) {
  const std::size_t threads = static_cast<std::size_t>(pool.size()), pages = (bytes + kPage - 1) / kPage;
  std::latch left(pool.size());
  pool.run([&](int thread) {
    const ScopedAffinity affinity(pool.place(thread).cpus);
    // Threads are numbered node by node, so this is a part of the node's share.
    const std::size_t index = static_cast<std::size_t>(thread);
    touch(memory + pages * index / threads * kPage, memory + std::min(bytes, pages * (index + 1) / threads * kPage));
    left.count_down();
    if (thread == 0) left.wait();  // so that every thread takes part
  });
}

}  // namespace quire
