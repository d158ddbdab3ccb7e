#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "kv_cache/page_pool.h"
#include "kv_cache/radix_tree.h"

namespace quire {

/// What a page is used for, to be drawn.
enum PageState : std::uint8_t {
  kFree,
  kHeld,    ///< one sequence has it
  kShared,  ///< several have it
  kCached,  ///< only the tree has it
  kPinned,  ///< a pin keeps it, whoever else has it
};
inline constexpr std::size_t kPageStates = 5;

/// The pool as a picture. `pages` of each state are pages().total() together.
struct PageMap {
  std::array<std::int32_t, kPageStates> pages{};
  std::int32_t pages_per_cell = 1;
  std::vector<std::uint8_t> cells;  ///< a cell is a page: its state. Else [cells][kPageStates], parts of 255
};

/// The state of each page. Costs as much as there are pages.
std::vector<std::uint8_t> page_states(const PagePool& pool, const RadixTree& tree,
                                      std::span<const std::int32_t> pinned);

/// A picture of at most `max_cells` cells. Throws std::invalid_argument unless that is at least 1.
PageMap fold_states(std::vector<std::uint8_t> states, std::int32_t max_cells);

}  // namespace quire
