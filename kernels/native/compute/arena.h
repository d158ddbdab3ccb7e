#pragma once

#include <cstddef>
#include <memory>
#include <new>
#include <span>
#include <string>
#include <vector>

#include "compute/thread_pool.h"

namespace quire {

inline constexpr std::size_t kHugePage = std::size_t{2} << 20;  ///< bytes of a transparent huge page on x86-64

/// The system refuses memory. The message says how much was asked for.
class OutOfMemory final : public std::bad_alloc {
 public:
  explicit OutOfMemory(std::size_t bytes) : message_("the system refuses " + std::to_string(bytes) + " bytes") {}
  const char* what() const noexcept override { return message_.c_str(); }

 private:
  std::string message_;
};

/// An allocator whose memory is freed all at once, when it is destroyed. Allocations of a huge page or more are mapped
/// separately, on huge pages where the system grants them, and take no memory until they are touched.
class Arena {
 public:
  /// Returns zeroed memory, aligned to cache lines. Throws OutOfMemory if the system refuses.
  void* allocate(std::size_t bytes);

  /// Throws std::invalid_argument unless all of the memory was mapped by this arena.
  void check(const void* address, std::size_t bytes) const;

 private:
  struct Unmap {
    std::size_t bytes;
    void operator()(std::byte* address) const;
  };
  using Mapping = std::unique_ptr<std::byte, Unmap>;
  std::byte* map(std::size_t bytes);

  std::vector<Mapping> mappings_;
  std::byte* free_ = nullptr;  ///< the unused end of the last small mapping
  std::size_t left_ = 0;
};

/// Returns true if all of the bytes are part of the memory.
bool lies_within(const void* address, std::size_t bytes, std::span<const std::byte> memory);

/// Makes memory of a file resident that another process has written.
void read_pages(std::span<const std::byte> memory);

/// Makes the memory resident and keeps its contents, even if other threads write to it concurrently. Linux places a
/// page on the NUMA node that touches it first.
void touch_pages(std::byte* begin, std::byte* end);

/// Also moves it to huge pages. Linux does so on request (MADV_COLLAPSE) where its settings keep shared memory from
/// getting them on a fault, as they do by default.
void touch_huge_pages(std::byte* begin, std::byte* end);

/// Calls `touch`, one of the above, for all of the memory, for each share (ThreadPool::share_begin) from a thread of
/// its NUMA node.
void touch_by_node(ThreadPool& pool, std::byte* memory, std::size_t bytes, void (*touch)(std::byte*, std::byte*));

}  // namespace quire
