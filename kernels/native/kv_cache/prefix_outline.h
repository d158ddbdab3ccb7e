#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

#include "kv_cache/page_map.h"
#include "kv_cache/page_pool.h"
#include "kv_cache/radix_tree.h"

namespace quire {

/// A node of the prefix cache as people draw it: pages that follow each other without a branch. A salt has one without
/// pages. Its tokens are valid until the tree changes.
struct PrefixRun {
  std::int64_t id =
      0;  ///< constant while its first page stays cached, that of a salt while it is in use; or kWholeCache
  std::int32_t parent = -1;  ///< index of a run before it
  bool is_salted = false;
  std::uint32_t hits = 0;  ///< matches that included its first page; for a salt, the sum over its branches
  std::int32_t users = 0;  ///< sequences that hold its first page now
  std::array<std::int32_t, kPageStates> pages{};  ///< number of its own pages in each state
  std::int32_t branches = 0;                      ///< number of runs that follow it, in the outline or not
  std::int32_t pages_below = 0;                   ///< pages of all runs that follow it, at any distance
  bool is_next_evicted = false;                   ///< its last page is the least recently used one
  std::span<const std::int32_t> first{};          ///< tokens of its first page, none if it is salted
  std::span<const std::int32_t> last{};           ///< tokens of its last page, none if that is the first
};

inline constexpr std::int64_t kWholeCache = -1;

/// How much of the tree an outline has. Upper levels come before lower ones.
struct OutlineLimits {
  std::int32_t runs;                                     ///< most runs, with that of the whole cache
  std::int32_t levels;                                   ///< levels of runs whose branches are in the outline
  std::int32_t branches;                                 ///< most branches of each such run: the hottest ones
  std::unordered_map<std::int64_t, std::int32_t> shown;  ///< most branches of single runs at any level, by their ids
};

/// Returns the runs of the tree, parents first; `states` are those of `page_states`. Takes O(pages of the pool). Throws
/// std::invalid_argument for a limit below 0, or of no run.
std::vector<PrefixRun> outline(const RadixTree& tree, const PagePool& pool, std::span<const std::uint8_t> states,
                               const OutlineLimits& limits);

}  // namespace quire
