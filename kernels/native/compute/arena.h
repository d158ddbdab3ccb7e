#pragma once

#include <cstddef>
#include <memory>
#include <vector>

namespace quire {

inline constexpr std::size_t kHugePage = std::size_t{2} << 20;  ///< bytes, of the system's transparent ones on x86-64

/// Memory that lives as long as its owner: zeroed, aligned to cache lines, given back all at once. Large pieces are
/// mapped alone, on huge pages where granted, and cost nothing until they are touched.
class Arena {
 public:
  /// Throws std::bad_alloc when the system has no such amount.
  void* allocate(std::size_t bytes);

 private:
  struct Unmap {
    std::size_t bytes;
    void operator()(std::byte* address) const;
  };
  using Mapping = std::unique_ptr<std::byte, Unmap>;
  std::byte* map(std::size_t bytes);

  std::vector<Mapping> mappings_;
  std::byte* free_ = nullptr;  ///< the rest of the last small mapping
  std::size_t left_ = 0;
};

}  // namespace quire
