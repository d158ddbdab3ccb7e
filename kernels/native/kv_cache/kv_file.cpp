#include "kv_cache/kv_file.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <new>
#include <stdexcept>
#include <string>
#include <system_error>

#include "compute/arena.h"

namespace quire {
namespace {

std::size_t round_up(std::size_t value, std::size_t multiple) { return (value + multiple - 1) / multiple * multiple; }

[[noreturn]] void fail(int fd, const char* what, std::size_t bytes) {
  const std::string reason = std::generic_category().message(errno);
  throw std::invalid_argument("kv_memory_fd=" + std::to_string(fd) + " cannot be " + what + std::to_string(bytes) +
                              " bytes: " + reason + "; give a memfd without seals, or leave it out");
}

}  // namespace

KvFile::KvFile(int fd, std::int32_t num_pages, std::int32_t block_size, std::size_t tile_bytes)
    : num_pages_(static_cast<std::size_t>(num_pages)),
      num_tokens_(num_pages_ * static_cast<std::size_t>(block_size)),
      bytes_(round_up(kHeaderBytes + num_pages_ * sizeof(PageRecord) + num_tokens_ * sizeof(std::int32_t), kHugePage) +
             round_up(tile_bytes, kHugePage)) {
  if (ftruncate(fd, static_cast<off_t>(bytes_)) != 0) fail(fd, "resized to ", bytes_);
  void* address = mmap(nullptr, bytes_ + kHugePage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (address == MAP_FAILED) throw std::bad_alloc();
  reserved_ = static_cast<std::byte*>(address);
  auto aligned = reinterpret_cast<void*>(round_up(reinterpret_cast<std::uintptr_t>(address), kHugePage));
  if (mmap(aligned, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED | MAP_NORESERVE, fd, 0) == MAP_FAILED) {
    const int error = errno;
    munmap(reserved_, bytes_ + kHugePage);
    errno = error;
    fail(fd, "mapped, ", bytes_);
  }
  base_ = static_cast<std::byte*>(aligned);
  madvise(base_, bytes_, MADV_HUGEPAGE);  // only a hint
  touch_huge_pages(base_, tiles());
}

KvFile::~KvFile() { munmap(reserved_, bytes_ + kHugePage); }

std::span<PageRecord> KvFile::records() const {
  return {reinterpret_cast<PageRecord*>(base_ + kHeaderBytes), num_pages_};
}

std::span<std::int32_t> KvFile::tokens() const {
  return {reinterpret_cast<std::int32_t*>(records().data() + num_pages_), num_tokens_};
}

std::byte* KvFile::tiles() const {
  const auto end = reinterpret_cast<std::byte*>(tokens().data() + num_tokens_);
  return base_ + round_up(static_cast<std::size_t>(end - base_), kHugePage);
}

}  // namespace quire
