#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <string_view>

namespace quire {

/// Reads a cache entry. Returns nothing if it is absent, truncated or damaged.
std::optional<std::string> read_cache_entry(const std::filesystem::path& path);

/// Writes an entry under a private name and renames it, so that readers see a complete entry or none. Returns false if
/// the folder is not writable: the cache is only an optimisation, so that is not an error.
bool write_cache_entry(const std::filesystem::path& path, std::string_view object);

}  // namespace quire
