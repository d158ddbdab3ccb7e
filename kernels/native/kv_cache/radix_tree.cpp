#include "kv_cache/radix_tree.h"

#include <algorithm>
#include <array>
#include <bit>
#include <stdexcept>
#include <unordered_map>

#include "kv_cache/page_ledger.h"
#include "kv_cache/prefix_watch.h"
#include "kv_cache/state_store.h"

namespace quire {
namespace {

constexpr std::size_t kPrefetchBatch = 32;  // pages
constexpr std::int32_t kLine = 16;          // tokens of a cache line
constexpr std::size_t kCandidates = 64;     // hot paths: enough that the eviction of a few does not matter

template <class T>
std::span<T> array(Arena& arena, std::size_t count) {
  return {static_cast<T*>(arena.allocate(count * sizeof(T))), count};
}

std::int32_t checked(std::int32_t block_size) {
  if (block_size < 1) throw std::invalid_argument("block_size=" + std::to_string(block_size) + "; give at least 1");
  return block_size;
}

}  // namespace

RadixTree::RadixTree(PagePool& pool, std::int32_t block_size, PageLedger* ledger, StateStore* states)
    : pool_(pool),
      block_size_(checked(block_size)),
      ledger_(ledger),
      states_(states),
      model_(ledger != nullptr ? ledger->model() : model_key("")),
      nodes_(array<Node>(arena_, static_cast<std::size_t>(pool.total()))),
      page_roots_(array<std::int32_t>(arena_, nodes_.size())),
      tokens_(ledger != nullptr ? ledger->tokens()
                                : array<std::int32_t>(arena_, nodes_.size() * static_cast<std::size_t>(block_size))),
      buckets_(array<std::int32_t>(arena_, std::bit_ceil(2 * nodes_.size()))) {
  std::ranges::fill(nodes_, Node{});
  std::ranges::fill(buckets_, kNone);
  if (ledger_ != nullptr) take_over();
}

/// Begins with the pages of the ledger, which no sequence holds.
void RadixTree::take_over() {
  std::vector<std::int32_t> pages = ledger_->take_over();
  for (std::int32_t page : pages) {
    std::int32_t parent = ledger_->parent(page);
    if (parent == kNone) parent = enter_key(ledger_->prefix(page));
    add(page, parent, extend(hash_of(parent), tokens_of(page).data()));
  }
  std::ranges::reverse(pages);  // from leaves to roots, where they were last used at the same time
  std::ranges::stable_sort(pages, {}, [&](std::int32_t page) { return ledger_->last_use(page); });
  for (std::int32_t page : pages) link(page);
  std::ranges::sort(pages);
  pool_.take_over(pages);
}

std::int32_t RadixTree::enter(const std::string& salt) { return enter_key(root_key(model_, salt)); }

std::int32_t RadixTree::enter_key(const PrefixKey& key) {
  const auto [found, is_new] = root_of_.try_emplace(key, 0);
  if (is_new) {
    if (free_roots_.empty()) {
      roots_.emplace_back();
      free_roots_.push_back(-1 - static_cast<std::int32_t>(roots_.size()));
    }
    found->second = free_roots_.back();
    free_roots_.pop_back();
    roots_[root_index(found->second)] = {key, 0};
  }
  ++roots_[root_index(found->second)].uses;
  return found->second;
}

std::int32_t RadixTree::find_root(const PrefixKey& key) const {
  const auto found = root_of_.find(key);
  return found == root_of_.end() ? kNone : found->second;
}

void RadixTree::leave(std::int32_t root) {
  if (!is_root(root)) throw std::invalid_argument(std::to_string(root) + " is not a root in use");
  Root& entry = roots_[root_index(root)];
  if (--entry.uses > 0) return;
  root_of_.erase(entry.key);
  free_roots_.push_back(root);
}

void RadixTree::match(std::int32_t parent, std::span<const std::int32_t> tokens,
                      std::vector<std::int32_t>& pages) const {
  check_parent(parent);
  const auto size = static_cast<std::size_t>(block_size_);
  std::uint32_t hash = hash_of(parent);
  while (tokens.size() >= size) {
    // A page's hash depends only on tokens, so several pages are prefetched at once. In a tree that exceeds the caches,
    // that takes as long as fetching one.
    std::array<std::uint32_t, kPrefetchBatch> hashes;
    const std::size_t count = std::min(tokens.size() / size, hashes.size());
    for (std::size_t i = 0; i < count; ++i) {
      hashes[i] = hash = extend(hash, &tokens[i * size]);
      __builtin_prefetch(&buckets_[hash & (buckets_.size() - 1)]);
    }
    for (std::size_t i = 0; i < count; ++i) prefetch(buckets_[hashes[i] & (buckets_.size() - 1)]);
    for (std::size_t i = 0; i < count; ++i) {
      parent = find(parent, &tokens[i * size], hashes[i]);
      if (parent == kNone) return;
      pages.push_back(parent);
    }
    tokens = tokens.subspan(count * size);
  }
}

std::int32_t RadixTree::insert(std::int32_t parent, std::span<const std::int32_t> tokens, std::int32_t page,
                               std::optional<std::uint64_t> content) {
  if (tokens.size() != static_cast<std::size_t>(block_size_))
    throw std::invalid_argument("a page holds " + std::to_string(block_size_) + " tokens; " +
                                std::to_string(tokens.size()) + " were given");
  check_parent(parent);
  const std::uint32_t hash = extend(hash_of(parent), tokens.data());
  const std::int32_t known = find(parent, tokens.data(), hash);
  if (known != kNone) return known;
  pool_.retain(page);  // throws for a page that does not exist or is free
  if (contains(page)) {
    pool_.release(page);
    throw std::logic_error("page " + std::to_string(page) + " is already in the tree");
  }
  if (parent < 0) ++roots_[root_index(parent)].uses;
  std::ranges::copy(tokens, tokens_.begin() + std::int64_t{page} * block_size_);
  if (ledger_ != nullptr)
    ledger_->add(page, parent, parent < 0 ? roots_[root_index(parent)].key : ledger_->key(parent), content);
  add(page, parent, hash);
  return page;
}

std::vector<PrefixKey> RadixTree::keys(std::int32_t root, std::span<const std::int32_t> tokens) const {
  if (!is_root(root)) throw std::invalid_argument(std::to_string(root) + " is not a root in use");
  std::vector<PrefixKey> keys{roots_[root_index(root)].key};
  const auto size = static_cast<std::size_t>(block_size_);
  for (std::size_t end = size; end <= tokens.size(); end += size)
    keys.push_back(extend_key(keys.back(), tokens.subspan(end - size, size)));
  return keys;
}

/// Adds a page whose tokens are there already.
void RadixTree::add(std::int32_t page, std::int32_t parent, std::uint32_t hash) {
  std::int32_t* head = bucket(hash);
  nodes_[page] = {.parent = parent,
                  .depth = parent < 0 ? 1 : nodes_[parent].depth + 1,
                  .hash = hash,
                  .chain = *head,
                  .generation = nodes_[page].generation};
  *head = page;
  page_roots_[page] = parent < 0 ? parent : page_roots_[parent];
  ++size_;
  for (PrefixWatch* watch : watches_) watch->note_added(page);
}

void RadixTree::retain(std::int32_t page) {
  pool_.retain(page);  // throws for a page that does not exist or is free
  if (contains(page) && pool_.references(page) == 2) unlink(page);
}

void RadixTree::release(std::int32_t page) {
  const std::int32_t references = pool_.references(page);
  if (references == 1 && contains(page))
    throw std::logic_error("release of page " + std::to_string(page) + ", which no sequence holds");
  pool_.release(page);
  if (references == 2 && contains(page)) link(page);
}

std::int32_t RadixTree::evict(std::int32_t count) {
  std::int32_t evicted = 0;
  while (evicted < count && first_ != kNone) {
    const std::int32_t end = std::min(count, evicted + static_cast<std::int32_t>(kPrefetchBatch));
    std::int32_t page = first_;  // prefetch the scattered state of the next ones
    for (std::int32_t i = evicted; i < end && page != kNone; ++i, page = nodes_[page].next) {
      __builtin_prefetch(bucket(nodes_[page].hash));
      pool_.prefetch(page);
    }
    for (; evicted < end && first_ != kNone; ++evicted) remove(first_);
  }
  num_evicted_ += evicted;
  return evicted;
}

void RadixTree::check_parent(std::int32_t parent) const {
  if (parent >= 0) return check_in_tree(parent);
  if (!is_root(parent)) throw std::invalid_argument(std::to_string(parent) + " is not a root in use");
}

void RadixTree::check_in_tree(std::int32_t page) const {
  if (page < 0 || page >= pool_.total() || !contains(page))
    throw std::invalid_argument("page " + std::to_string(page) + " is not in the tree");
}

/// Returns the hash of the prefix that ends at `parent`, a page or a root.
std::uint32_t RadixTree::hash_of(std::int32_t parent) const {
  return parent < 0 ? static_cast<std::uint32_t>(parent) : nodes_[parent].hash;
}

/// Returns the hash of a prefix extended by a page of tokens.
std::uint32_t RadixTree::extend(std::uint32_t prefix, const std::int32_t* tokens) const {
  std::uint64_t hash = prefix;
  for (std::int32_t i = 0; i < block_size_; ++i)
    hash = (hash ^ static_cast<std::uint32_t>(tokens[i])) * 0x9E3779B97F4A7C15ull ^ hash >> 29;
  return static_cast<std::uint32_t>(hash >> 32);
}

/// Prefetches the state of a page that `find` reads.
void RadixTree::prefetch(std::int32_t page) const {
  if (page == kNone) return;
  __builtin_prefetch(&nodes_[page]);
  const std::int32_t* tokens = &tokens_[static_cast<std::size_t>(page) * static_cast<std::size_t>(block_size_)];
  for (std::int32_t i = 0; i < block_size_; i += kLine) __builtin_prefetch(tokens + i);
}

std::int32_t RadixTree::find(std::int32_t parent, const std::int32_t* tokens, std::uint32_t hash) const {
  std::int32_t page = buckets_[hash & (buckets_.size() - 1)];
  for (; page != kNone; page = nodes_[page].chain) {
    const Node& node = nodes_[page];
    if (node.hash == hash && node.parent == parent &&
        std::equal(tokens, tokens + block_size_, tokens_.begin() + std::int64_t{page} * block_size_))
      break;
  }
  return page;
}

/// Appends a page that no sequence holds any more to the LRU list.
void RadixTree::link(std::int32_t page) {
  nodes_[page].next = kNone;
  nodes_[page].previous = last_;
  (last_ == kNone ? first_ : nodes_[last_].next) = page;
  last_ = page;
  ++cached_;
  if (ledger_ != nullptr) ledger_->release(page);
}

void RadixTree::unlink(std::int32_t page) {
  const Node& node = nodes_[page];
  (node.previous == kNone ? first_ : nodes_[node.previous].next) = node.next;
  (node.next == kNone ? last_ : nodes_[node.next].previous) = node.previous;
  --cached_;
  if (ledger_ != nullptr) ledger_->use(page);
}

/// Frees a cached leaf.
void RadixTree::remove(std::int32_t page) {
  unlink(page);
  std::int32_t* at = bucket(nodes_[page].hash);
  while (*at != page) at = &nodes_[*at].chain;
  *at = nodes_[page].chain;
  const std::int32_t parent = nodes_[page].parent;
  if (nodes_[page].is_hot) drop_candidate(page);
  nodes_[page] = {.generation = nodes_[page].generation + 1u};
  --size_;
  if (ledger_ != nullptr) ledger_->remove(page);
  if (states_ != nullptr) states_->detach(page);
  for (PrefixWatch* watch : watches_) watch->note_removed(page);
  pool_.release(page);
  if (parent < kNone) leave(parent);
}

std::vector<std::int32_t> RadixTree::depth_first(std::span<const std::int32_t> ends) const {
  struct Branch {
    std::int32_t longest = 0;            ///< length of the longest path through this page, in pages
    std::vector<std::int32_t> children;  ///< pages
    std::vector<std::int32_t> end_here;  ///< indices of `ends`
  };
  for (const std::int32_t end : ends)
    if (end != kNone) check_in_tree(end);
  std::unordered_map<std::int32_t, Branch> branches;
  Branch top;
  for (std::int32_t i = 0; i < static_cast<std::int32_t>(ends.size()); ++i) {
    (ends[i] == kNone ? top : branches[ends[i]]).end_here.push_back(i);
    const std::int32_t length = ends[i] == kNone ? 0 : nodes_[ends[i]].depth;
    for (std::int32_t page = ends[i]; page >= 0; page = nodes_[page].parent) {
      Branch& branch = branches[page];
      if (branch.longest >= length) break;  // and so are its ancestors
      const std::int32_t parent = nodes_[page].parent;
      if (branch.longest == 0) (parent < 0 ? top : branches[parent]).children.push_back(page);
      branch.longest = length;
    }
  }
  std::vector<std::int32_t> order;
  struct Visit {
    Branch* branch;
    bool children_done;
  };
  std::vector<Visit> stack{{&top, false}};
  while (!stack.empty()) {
    const auto [branch, children_done] = stack.back();
    stack.pop_back();
    if (children_done) {
      order.insert(order.end(), branch->end_here.begin(), branch->end_here.end());
      continue;
    }
    stack.push_back({branch, true});
    std::ranges::stable_sort(branch->children, {}, [&](std::int32_t page) { return branches[page].longest; });
    for (const std::int32_t page : branch->children)
      stack.push_back({&branches[page], false});  // the longest path on top
  }
  return order;
}

void RadixTree::count_match(std::span<const std::int32_t> path) {
  if (path.empty()) return;
  for (std::size_t i = 0; i < path.size(); ++i) {
    check_in_tree(path[i]);
    const std::int32_t parent = nodes_[path[i]].parent;
    if (i == 0 ? parent >= 0 : parent != path[i - 1])
      throw std::invalid_argument("page " + std::to_string(path[i]) + " does not follow " +
                                  (i == 0 ? "a root" : "page " + std::to_string(path[i - 1])));
  }
  for (const std::int32_t page : path) ++nodes_[page].hits;
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
    nodes_[least->end].is_hot = 0;
    *least = path;
  }
  nodes_[path.end].is_hot = 1;
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
    prefixes.push_back({node.hits, node.depth, pool_.references(end) - 1, is_salted(nodes_[first].parent),
                        tokens_of(first), node.depth == 1 ? std::span<const std::int32_t>() : tokens_of(end)});
  }
  return prefixes;
}

}  // namespace quire
