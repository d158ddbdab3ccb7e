#include "kv_cache/prefix_watch.h"

#include <algorithm>
#include <cstddef>
#include <unordered_map>

#include "kv_cache/radix_tree.h"

namespace quire {

PrefixWatch::PrefixWatch(std::int32_t pages) : told_(static_cast<std::size_t>(pages)) {}

void PrefixWatch::note(std::int32_t page) {
  if (at(page).is_noted) return;
  at(page).is_noted = true;
  noted_.push_back(page);
}

/// Tells that the prefix of a page is no longer there, if it was told before.
void PrefixWatch::remove(std::int32_t page, PrefixChanges& changes) {
  if (at(page).is_told) changes.removed.push_back(at(page).key);
  at(page).is_told = false;
}

PrefixChanges PrefixWatch::take(const RadixTree& tree) {
  PrefixChanges changes;
  std::vector<std::int32_t> present;
  for (const std::int32_t page : noted_) {
    at(page).is_noted = false;
    if (tree.contains(page))
      present.push_back(page);
    else
      remove(page, changes);
  }
  noted_.clear();
  std::ranges::sort(present, {}, [&](std::int32_t page) { return std::pair(tree.depth(page), page); });
  std::unordered_map<std::int32_t, std::size_t> run_that_ends;  // at a page
  for (const std::int32_t page : present) {
    const std::int32_t parent = tree.view(page).parent, root = parent < 0 ? parent : at(parent).root;
    const PrefixKey key = extend_key(parent < 0 ? tree.key_of(root) : at(parent).key, tree.tokens_of(page));
    at(page).root = root;
    if (at(page).is_told && at(page).key == key) continue;
    remove(page, changes);
    const auto found = run_that_ends.find(parent);
    const bool extends = found != run_that_ends.end();
    const std::size_t run = extends ? found->second : changes.stored.size();
    if (extends) {
      run_that_ends.erase(found);
    } else {
      const std::optional<PrefixKey> before = parent < 0 ? std::nullopt : std::optional(at(parent).key);
      changes.stored.push_back({before, tree.key_of(root), tree.is_salted(root), {}, {}});
    }
    changes.stored[run].keys.push_back(key);
    std::ranges::copy(tree.tokens_of(page), std::back_inserter(changes.stored[run].tokens));
    run_that_ends.emplace(page, run);
    at(page).key = key;
    at(page).is_told = true;
  }
  return changes;
}

}  // namespace quire
