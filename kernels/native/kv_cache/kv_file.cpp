#include "kv_cache/kv_file.h"

#include <unistd.h>

#include <cerrno>
#include <stdexcept>
#include <string>
#include <system_error>

#include "compute/arena.h"

namespace quire {
namespace {

std::size_t round_up(std::size_t value, std::size_t multiple) { return (value + multiple - 1) / multiple * multiple; }

[[noreturn]] void fail(int fd, const char* what, std::size_t bytes, int error) {
  const std::string reason = std::generic_category().message(error);
  throw std::invalid_argument("kv_memory_fd=" + std::to_string(fd) + " cannot be " + what + std::to_string(bytes) +
                              " bytes: " + reason + "; give a memfd without seals, or leave it out");
}

FileMapping map_resized(int fd, std::size_t bytes) {
  if (ftruncate(fd, static_cast<off_t>(bytes)) != 0) fail(fd, "resized to ", bytes, errno);
  try {
    return {fd, bytes, true};
  } catch (const std::system_error& error) {
    fail(fd, "mapped, ", bytes, error.code().value());
  }
}

}  // namespace

KvFile::KvFile(int fd, std::int32_t num_pages, std::int32_t block_size, std::int32_t num_records,
               const Contents& contents)
    : num_pages_(static_cast<std::size_t>(num_pages)),
      num_tokens_(num_pages_ * static_cast<std::size_t>(block_size)),
      num_records_(static_cast<std::size_t>(num_records)),
      tile_bytes_(round_up(contents.tile_bytes, kHugePage)),
      mapping_(map_resized(fd, round_up(kHeaderBytes + num_pages_ * sizeof(PageRecord) +
                                            num_tokens_ * sizeof(std::int32_t) + (num_records_ + 1) * sizeof(StateSeal),
                                        kHugePage) +
                                   tile_bytes_ + round_up(contents.state_bytes, kHugePage))) {
  touch_huge_pages(mapping_.memory().data(), tiles());
}

std::span<PageRecord> KvFile::records() const {
  return {reinterpret_cast<PageRecord*>(mapping_.memory().data() + kHeaderBytes), num_pages_};
}

std::span<std::int32_t> KvFile::tokens() const {
  return {reinterpret_cast<std::int32_t*>(records().data() + num_pages_), num_tokens_};
}

std::span<StateSeal> KvFile::seals() const {
  std::byte* const base = mapping_.memory().data();
  const auto end = reinterpret_cast<std::byte*>(tokens().data() + num_tokens_) - base;
  return {reinterpret_cast<StateSeal*>(base + round_up(static_cast<std::size_t>(end), alignof(StateSeal))),
          num_records_};
}

std::byte* KvFile::tiles() const {
  std::byte* const base = mapping_.memory().data();
  const auto end = reinterpret_cast<std::byte*>(seals().data() + num_records_) - base;
  return base + round_up(static_cast<std::size_t>(end), kHugePage);
}

std::byte* KvFile::states() const { return tiles() + tile_bytes_; }

}  // namespace quire
