#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "kv_cache/page_pool.h"
#include "kv_cache/radix_tree.h"

namespace quire {

/// The use of a page, as the page map shows it.
enum PageState : std::uint8_t {
  kFree,
  kHeld,    ///< one sequence holds it
  kShared,  ///< several sequences hold it
  kCached,  ///< only the prefix cache holds it
  kPinned,  ///< a pin holds it, regardless of sequences
};
inline constexpr std::size_t kPageStates = 5;

/// A map of the pool, one cell for one or more pages.
struct PageMap {
  std::array<std::int32_t, kPageStates> pages{};  ///< number of pages in each state
  std::int32_t pages_per_cell = 1;
  std::vector<std::uint8_t> cells{};  ///< the state of a page, or [cells][kPageStates] shares of 255
};

/// Returns the state of each page, in O(pages).
std::vector<std::uint8_t> page_states(const PagePool& pool, const RadixTree& tree,
                                      std::span<const std::int32_t> pinned);

/// Returns a map of at most `max_cells` cells. Throws std::invalid_argument unless that is at least 1.
PageMap downsample(std::vector<std::uint8_t> states, std::int32_t max_cells);

}  // namespace quire
