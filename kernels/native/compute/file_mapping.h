#pragma once

#include <cstddef>
#include <span>

namespace quire {

/// The memory of a file, usually a memfd, that other processes may map too. It begins at a multiple of a huge page, and
/// lies on huge pages where the system grants them.
class FileMapping {
 public:
  /// Maps the first `bytes` of the file, which must have as many. Throws OutOfMemory or std::system_error.
  FileMapping(int fd, std::size_t bytes, bool writable);
  ~FileMapping();
  FileMapping(const FileMapping&) = delete;
  FileMapping& operator=(const FileMapping&) = delete;

  std::span<std::byte> memory() const { return {base_, bytes_}; }

  /// From now on this process cannot write to the memory. Throws std::system_error.
  void make_read_only();

 private:
  std::size_t bytes_;
  std::byte* reserved_;  ///< address space, a huge page more than the file so that it can be aligned
  std::byte* base_;
};

}  // namespace quire
