#include "kv_cache/page_map.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace quire {
namespace {

using Counts = std::array<std::int32_t, kPageStates>;

PageState state_of(std::int32_t references, bool in_tree) {
  if (references == 0) return kFree;
  const std::int32_t holders = references - in_tree;
  return holders == 0 ? kCached : holders == 1 ? kHeld : kShared;
}

Counts count(std::span<const std::uint8_t> states) {
  Counts counts{};
  for (std::uint8_t state : states) ++counts[state];
  return counts;
}

void append_shares(const Counts& counts, std::size_t total, std::vector<std::uint8_t>& cells) {
  const auto pages = static_cast<std::int64_t>(total);
  for (std::int32_t of_state : counts)
    cells.push_back(static_cast<std::uint8_t>((std::int64_t{of_state} * 255 + pages / 2) / pages));
}

}  // namespace

std::vector<std::uint8_t> page_states(const PagePool& pool, const RadixTree& tree,
                                      std::span<const std::int32_t> pinned) {
  const std::span references = pool.references();
  std::vector<std::uint8_t> states(references.size());
  for (std::size_t page = 0; page < states.size(); ++page)
    states[page] = state_of(references[page], tree.contains(static_cast<std::int32_t>(page)));
  for (std::int32_t page : pinned) states[static_cast<std::size_t>(page)] = kPinned;
  return states;
}

PageMap downsample(std::vector<std::uint8_t> states, std::int32_t max_cells) {
  if (max_cells < 1) throw std::invalid_argument("max_cells=" + std::to_string(max_cells) + "; give at least 1");
  const std::size_t cells = static_cast<std::size_t>(max_cells);
  const std::size_t per_cell = (states.size() + cells - 1) / cells;
  PageMap map{.pages_per_cell = static_cast<std::int32_t>(per_cell)};
  if (per_cell == 1) {
    map.pages = count(states);
    map.cells = std::move(states);
    return map;
  }
  for (std::size_t first = 0; first < states.size(); first += per_cell) {
    const std::size_t size = std::min(per_cell, states.size() - first);
    const Counts counts = count(std::span(states).subspan(first, size));
    for (std::size_t state = 0; state < kPageStates; ++state) map.pages[state] += counts[state];
    append_shares(counts, size, map.cells);
  }
  return map;
}

}  // namespace quire
