#pragma once

#include <filesystem>
#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>

namespace quire {

/// Returns the key of a cache entry that is made of these parts.
std::string cache_key(std::initializer_list<std::string> parts);

/// An entry of the cache: its object, or why it cannot be used; neither if there is no entry.
struct CacheEntry {
  std::optional<std::string> object;
  std::string problem;
};

/// Reads a cache entry: the magic, its key, the digest of the object, the object.
CacheEntry read_cache_entry(const std::filesystem::path& path, std::string_view key);

/// Writes an entry under a private name and renames it, so that readers see a complete entry or none. A folder that is
/// not writable is no error: the cache is only an optimisation.
void write_cache_entry(const std::filesystem::path& path, std::string_view key, std::string_view object);

}  // namespace quire
