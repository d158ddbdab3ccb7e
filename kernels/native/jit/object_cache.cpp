#include "jit/object_cache.h"

#include <unistd.h>

#include <atomic>
#include <fstream>
#include <iterator>
#include <system_error>

#include "llvm/ADT/ArrayRef.h"
#include "llvm/ADT/StringExtras.h"
#include "llvm/Support/SHA256.h"

namespace quire {
namespace {

constexpr std::string_view kMagic = "quire-object-1\n";

std::string digest(std::string_view bytes) {
  auto hash = llvm::SHA256::hash(llvm::ArrayRef(reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size()));
  return llvm::toHex(hash);
}

}  // namespace

std::optional<std::string> read_cache_entry(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) return std::nullopt;
  std::string content{std::istreambuf_iterator<char>(file), {}};
  constexpr size_t header = kMagic.size() + 64;
  if (content.size() < header || !std::string_view(content).starts_with(kMagic)) return std::nullopt;
  std::string object = content.substr(header);
  if (content.compare(kMagic.size(), 64, digest(object)) != 0) return std::nullopt;
  return object;
}

bool write_cache_entry(const std::filesystem::path& path, std::string_view object) {
  static std::atomic<int> counter{0};
  std::error_code error;
  std::filesystem::create_directories(path.parent_path(), error);
  auto temporary = path;
  temporary.concat(".").concat(std::to_string(getpid())).concat(".").concat(std::to_string(counter++));
  {
    std::ofstream file(temporary, std::ios::binary);
    file << kMagic << digest(object) << object;
    if (!file.flush()) {
      std::filesystem::remove(temporary, error);
      return false;
    }
  }
  std::filesystem::rename(temporary, path, error);
  if (error) std::filesystem::remove(temporary, error);
  return !error;
}

}  // namespace quire
