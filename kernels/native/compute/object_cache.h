#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <string_view>

namespace quire {

/// Reads a cache entry; nothing when it is absent, truncated or damaged.
std::optional<std::string> read_cache_entry(const std::filesystem::path& path);

/// Writes an entry under a private name and renames it, so that readers see a whole entry or none.
/// Returns false when the folder can't be written; the cache is an optimisation, so that is no error.
bool write_cache_entry(const std::filesystem::path& path, std::string_view object);

}  // namespace quire
