#include "checksum/checksum.h"

#include <llvm/Support/xxhash.h>

namespace quire {

std::uint64_t checksum(std::span<const std::byte> bytes) {
  return llvm::xxh3_64bits({reinterpret_cast<const std::uint8_t*>(bytes.data()), bytes.size()});
}

}  // namespace quire
