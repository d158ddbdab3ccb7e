#include <algorithm>

#include "kv_cache/radix_tree.h"

namespace quire {
namespace {

constexpr std::size_t kCandidates = 64;  // enough that the eviction of a few does not matter

}  // namespace

void RadixTree::count_match(std::span<const std::int32_t> path) {
  if (path.empty()) return;
  for (std::int32_t page : path) ++nodes_[page].hits;
  Node& end = nodes_[path.back()];
  if (!end.is_hot && end.hits > least_hits_) add_candidate({path.back(), path.front()});
}

/// Adds a path to the candidates, replacing the one with the fewest hits if there is no room. `count_match` has
/// filtered by `least_hits_` before: hits only grow, so it stays a lower bound.
void RadixTree::add_candidate(HotPath path) {
  if (hot_.size() < kCandidates) {
    hot_.push_back(path);
  } else {
    const auto least = std::ranges::min_element(hot_, {}, [&](const HotPath& hot) { return nodes_[hot.end].hits; });
    least_hits_ = nodes_[least->end].hits;
    if (nodes_[path.end].hits <= least_hits_) return;
    nodes_[least->end].is_hot = false;
    *least = path;
  }
  nodes_[path.end].is_hot = true;
}

/// Drops a candidate whose end leaves the tree, which makes room for any other.
void RadixTree::drop_candidate(std::int32_t page) {
  std::erase_if(hot_, [page](const HotPath& hot) { return hot.end == page; });
  least_hits_ = 0;
}

std::vector<HotPrefix> RadixTree::hottest(std::size_t count) const {
  std::vector<HotPath> paths = hot_;
  const auto rank = [&](const HotPath& path) { return std::pair(nodes_[path.end].hits, nodes_[path.end].depth); };
  std::ranges::sort(paths, std::ranges::greater{}, rank);
  paths.resize(std::min(count, paths.size()));
  std::vector<HotPrefix> prefixes;
  for (const auto [end, first] : paths) {
    const Node& node = nodes_[end];
    const bool is_salted = !roots_[root_index(nodes_[first].parent)].salt.empty();
    prefixes.push_back({node.hits, node.depth, pool_.references(end) - 1, is_salted, tokens_of(first),
                        node.depth == 1 ? std::span<const std::int32_t>() : tokens_of(end)});
  }
  return prefixes;
}

}  // namespace quire
