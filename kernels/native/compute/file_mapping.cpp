#include "compute/file_mapping.h"

#include <sys/mman.h>

#include <cerrno>
#include <cstdint>
#include <system_error>

#include "compute/arena.h"

namespace quire {
namespace {

[[noreturn]] void fail(int error) { throw std::system_error(error, std::generic_category()); }

std::byte* align(std::byte* address) {
  const std::size_t over = reinterpret_cast<std::uintptr_t>(address) % kHugePage;
  return address + (kHugePage - over) % kHugePage;
}

}  // namespace

FileMapping::FileMapping(int fd, std::size_t bytes, bool writable) : bytes_(bytes) {
  if (bytes > SIZE_MAX - kHugePage) throw OutOfMemory(bytes);
  void* address = mmap(nullptr, bytes + kHugePage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (address == MAP_FAILED) throw OutOfMemory(bytes);
  reserved_ = static_cast<std::byte*>(address);
  base_ = align(reserved_);
  const int protection = writable ? PROT_READ | PROT_WRITE : PROT_READ;
  if (mmap(base_, bytes, protection, MAP_SHARED | MAP_FIXED | MAP_NORESERVE, fd, 0) == MAP_FAILED) {
    const int error = errno;
    munmap(reserved_, bytes + kHugePage);
    fail(error);
  }
  madvise(base_, bytes, MADV_HUGEPAGE);  // only a hint
}

FileMapping::~FileMapping() { munmap(reserved_, bytes_ + kHugePage); }

void FileMapping::make_read_only() {
  if (mprotect(base_, bytes_, PROT_READ) != 0) fail(errno);
}

}  // namespace quire
