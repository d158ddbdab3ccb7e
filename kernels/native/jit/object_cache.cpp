#include "jit/object_cache.h"

#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <fstream>
#include <iterator>
#include <optional>
#include <system_error>
#include <utility>

#include "llvm/ADT/StringExtras.h"
#include "llvm/Support/SHA256.h"

namespace quire {
namespace {

constexpr std::string_view kMagic = "quire-object-2\n";
constexpr std::size_t kDigestSize = 64;

std::string digest(std::string_view bytes) {
  auto hash = llvm::SHA256::hash(llvm::ArrayRef(reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size()));
  return llvm::toHex(hash, true);
}

/// Returns the key of an entry that is made of these parts.
std::string cache_key(std::initializer_list<std::string> parts) {
  llvm::SHA256 hash;
  const auto add = [&](llvm::StringRef part) {
    hash.update(part);
    hash.update(llvm::StringRef("\0", 1));
  };
  add(llvm::StringRef(kMagic.data(), kMagic.size()));
  for (const std::string& part : parts) add(part);
  return llvm::toHex(hash.final(), true);
}

/// An entry of the cache: its object, or why it cannot be used; neither if there is no entry.
struct CacheEntry {
  std::optional<std::string> object;
  std::string problem;
};

/// Reads an entry: the magic, its key, the digest of the object, the object.
CacheEntry read_cache_entry(const std::filesystem::path& path, std::string_view key) {
  std::ifstream file(path, std::ios::binary);
  if (!file) return {};
  std::string content;
  try {
    content.assign(std::istreambuf_iterator<char>(file), {});
  } catch (const std::ios_base::failure&) {  // a folder, or a disk that fails
    return {{}, "cannot be read"};
  }
  const std::string_view all(content);
  constexpr std::size_t header = kMagic.size() + 2 * kDigestSize;
  if (all.size() < header || !all.starts_with(kMagic)) return {{}, "is truncated or no entry of this cache"};
  if (all.substr(kMagic.size(), kDigestSize) != key) return {{}, "is the entry of another kernel"};
  const std::string_view object = all.substr(header);
  if (all.substr(kMagic.size() + kDigestSize, kDigestSize) != digest(object)) return {{}, "is damaged"};
  return {std::string(object), {}};
}

/// Writes an entry under a private name and renames it, so that readers see a complete entry or none.
void write_cache_entry(const std::filesystem::path& path, std::string_view key, std::string_view object) {
  static std::atomic<int> counter{0};
  std::error_code error;
  std::filesystem::create_directories(path.parent_path(), error);
  auto temporary = path;
  temporary.concat(".").concat(std::to_string(getpid())).concat(".").concat(std::to_string(counter++));
  {
    std::ofstream file(temporary, std::ios::binary);
    file << kMagic << key << digest(object) << object;
    if (!file.flush()) {
      std::filesystem::remove(temporary, error);
      return;
    }
  }
  std::filesystem::rename(temporary, path, error);
  if (error) std::filesystem::remove(temporary, error);
}

}  // namespace

std::string ObjectCache::get(std::initializer_list<std::string> parts, const char* suffix,
                             const std::function<std::string()>& compile) {
  const auto compiled = [&] {
    std::string object = compile();
    compiled_++;
    return object;
  };
  if (folder_.empty()) return compiled();
  const std::string key = cache_key(parts);
  const std::filesystem::path path = folder_ / (key + suffix);
  CacheEntry entry = read_cache_entry(path, key);
  if (entry.object) {
    hits_++;
    return std::move(*entry.object);
  }
  if (!entry.problem.empty()) {
    const std::lock_guard lock(mutex_);
    rejected_.push_back(path.string() + " " + entry.problem);
  }
  const std::string object = compiled();
  write_cache_entry(path, key, object);
  return object;
}

std::vector<std::string> ObjectCache::rejected() const {
  const std::lock_guard lock(mutex_);
  return rejected_;
}

}  // namespace quire
