#include "kv_cache/prefix_watch.h"

#include <algorithm>
#include <cstddef>
#include <iterator>

#include "kv_cache/radix_tree.h"

namespace quire {

PrefixWatch::PrefixWatch(RadixTree& tree, bool all_salts)
    : tree_(tree), pages_(static_cast<std::size_t>(tree.total())) {
  if (all_salts)
    note_below(std::vector<bool>(tree.num_roots(), true));
  else
    salts_.emplace();
  tree.add_watch(*this);
}

PrefixWatch::~PrefixWatch() { tree_.remove_watch(*this); }

std::vector<PrefixKey> PrefixWatch::add_salts(const std::vector<std::string>& salts) {
  std::vector<PrefixKey> keys;
  std::vector<bool> new_roots(tree_.num_roots(), false);
  bool has_pages = false;
  for (const std::string& salt : salts) {
    keys.push_back(tree_.key_of(salt));
    if (!salts_ || !salts_->insert(keys.back()).second) continue;
    const std::int32_t root = tree_.find_root(keys.back());
    if (root == kNone) continue;
    new_roots[RadixTree::root_index(root)] = true;
    has_pages = true;
  }
  if (has_pages) note_below(new_roots);
  return keys;
}

/// Notes all pages below some roots, given by their indices, each after its parent.
void PrefixWatch::note_below(const std::vector<bool>& roots) {
  std::vector<std::int32_t> path;
  for (std::int32_t page = 0; page < tree_.total(); ++page) {
    if (!tree_.contains(page) || !roots[RadixTree::root_index(tree_.root_of(page))]) continue;
    for (std::int32_t up = page; up >= 0 && at(up).state == State::kIgnored; up = tree_.view(up).parent)
      path.push_back(up);
    for (; !path.empty(); path.pop_back()) note(path.back());
  }
}

void PrefixWatch::note_added(std::int32_t page) {
  if (watches(page)) note(page);
}

void PrefixWatch::note_removed(std::int32_t page) {
  if (at(page).state == State::kNoted) unlink(page);
  if (at(page).state == State::kTold) removed_.push_back(at(page).key);
  at(page).state = State::kIgnored;
}

/// Returns true if the root above a page of the tree is watched.
bool PrefixWatch::watches(std::int32_t page) {
  const std::int32_t parent = tree_.view(page).parent;
  if (parent >= 0) return at(parent).state != State::kIgnored;
  return !salts_ || salts_->contains(tree_.key_of(parent));
}

bool PrefixWatch::has_changes() const { return !removed_.empty() || first_ != kNone; }

PrefixChanges PrefixWatch::take(std::int32_t most) {
  PrefixChanges changes;
  for (; most > 0 && !removed_.empty(); --most) {  // all of them before any is told that may have the same key
    changes.removed.push_back(removed_.front());
    removed_.pop_front();
  }
  for (std::int32_t before = kNone; most > 0 && first_ != kNone; --most) {
    const std::int32_t page = first_, parent = tree_.view(page).parent, root = tree_.root_of(page);
    if (parent != before) {
      const std::optional<PrefixKey> key = parent < 0 ? std::nullopt : std::optional(at(parent).key);
      changes.stored.push_back({key, tree_.key_of(root), tree_.is_salted(root), {}, {}});
    }
    take_first(changes.stored.back());
    before = page;
  }
  return changes;
}

/// Appends the first noted page to a run that ends before it.
void PrefixWatch::take_first(StoredRun& run) {
  const std::int32_t page = first_;
  const std::span<const std::int32_t> tokens = tree_.tokens_of(page);
  at(page).key = extend_key(run.keys.empty() ? run.parent.value_or(run.root) : run.keys.back(), tokens);
  at(page).state = State::kTold;
  unlink(page);
  run.keys.push_back(at(page).key);
  std::ranges::copy(tokens, std::back_inserter(run.tokens));
}

/// Appends a page to the list of noted ones.
void PrefixWatch::note(std::int32_t page) {
  at(page).state = State::kNoted;
  at(page).next = kNone;
  at(page).previous = last_;
  (last_ == kNone ? first_ : at(last_).next) = page;
  last_ = page;
}

/// Takes a page out of the list of noted ones.
void PrefixWatch::unlink(std::int32_t page) {
  const auto [next, previous] = std::pair(at(page).next, at(page).previous);
  (previous == kNone ? first_ : at(previous).next) = next;
  (next == kNone ? last_ : at(next).previous) = previous;
}

}  // namespace quire
