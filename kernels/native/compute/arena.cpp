#include "compute/arena.h"

#include <sys/mman.h>

#include <cstdint>
#include <new>

#include "compute/abi.h"

namespace quire {
namespace {

std::size_t round_up(std::size_t value, std::size_t multiple) { return (value + multiple - 1) / multiple * multiple; }

}  // namespace

void Arena::Unmap::operator()(std::byte* address) const { munmap(address, bytes); }

std::byte* Arena::map(std::size_t bytes) {
  const std::size_t whole = bytes + kHugePage;  // room to align
  void* address = mmap(nullptr, whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (address == MAP_FAILED) throw std::bad_alloc();
  mappings_.emplace_back(static_cast<std::byte*>(address), Unmap{whole});
  auto aligned = reinterpret_cast<std::byte*>(round_up(reinterpret_cast<std::uintptr_t>(address), kHugePage));
  if (bytes >= kHugePage) madvise(aligned, bytes, MADV_HUGEPAGE);  // only a hint
  return aligned;
}

void* Arena::allocate(std::size_t bytes) {
  bytes = round_up(bytes, std::size_t{kCacheLine});
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

}  // namespace quire
