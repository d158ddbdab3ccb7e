#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "compute/arena.h"
#include "kv_cache/page_pool.h"
#include "kv_cache/prefix_key.h"

namespace quire {

class PageLedger;
class PrefixWatch;
class StateStore;

/// A cached prefix that many requests have matched.
struct HotPrefix {
  std::uint32_t hits;                   ///< matches that included its last page
  std::int32_t pages;                   ///< length of the prefix
  std::int32_t users;                   ///< sequences that hold it now
  bool is_salted;                       ///< it has a salt, so its tokens may be private
  std::span<const std::int32_t> first;  ///< tokens of its first page; both spans are valid until the tree changes
  std::span<const std::int32_t> last;   ///< tokens of its last page; empty if it is the first
};

/// The prefix cache: full pages of KV memory, keyed by their tokens and those of all pages before them.
///
/// Each node is a page. Its edge holds the page's tokens; its parent is the previous page, or the root of a salt. So an
/// edge is never split, and a page's number is that of its node. Tokens are compared, not only hashed.
///
/// The tree holds a reference to each of its pages. A page that a sequence holds as well is locked. A sequence holds
/// all pages before its last one, so locks reach up to the root. The unlocked pages, called cached, are in an LRU list
/// in the order of their release, each path from its leaf to its root. So a page never precedes its descendants, and
/// the head of the list is always a leaf, the least recently used one.
///
/// Every operation is linear in the pages and tokens that it touches. Not thread-safe: the step loop owns it.
///
/// A page or root that does not exist, or is not as an operation needs it, makes that throw std::invalid_argument or
/// std::logic_error; nothing has changed then.
class RadixTree {
 public:
  static constexpr std::int32_t kNone = -1;

  /// The tree of a ledger begins with the pages that the ledger takes over, and keeps its account from then on. The
  /// pool must be new, and both must outlive the tree, as must `states`, which has the snapshots of its pages. Throws
  /// std::invalid_argument unless a page holds at least one token.
  RadixTree(PagePool& pool, std::int32_t block_size, PageLedger* ledger = nullptr, StateStore* states = nullptr);
  RadixTree(const RadixTree&) = delete;
  RadixTree& operator=(const RadixTree&) = delete;

  /// Returns the root of the prefixes under `salt`, a negative number; prefixes of other salts are not reachable from
  /// it. Each call needs one of `leave`: a root lives while it is in use or has pages below it.
  std::int32_t enter(const std::string& salt);
  void leave(std::int32_t root);

  /// Appends to `pages` the longest match of `tokens` in full pages below `parent`, a root or a page of the tree.
  void match(std::int32_t parent, std::span<const std::int32_t> tokens, std::vector<std::int32_t>& pages) const;

  /// Inserts a page, which the caller holds, below `parent`, keyed by its tokens. Returns the page that the tree holds
  /// for these tokens: an earlier one if they were there already, which the caller should then use instead. `content`:
  /// checksum of its tiles, where that is known.
  std::int32_t insert(std::int32_t parent, std::span<const std::int32_t> tokens, std::int32_t page,
                      std::optional<std::uint64_t> content = std::nullopt);

  /// Returns the keys of the prefixes of `tokens` that end with a full page below a root, that of the root first.
  std::vector<PrefixKey> keys(std::int32_t root, std::span<const std::int32_t> tokens) const;

  void retain(std::int32_t page);   ///< holds a page, in the tree or not, for one more sequence
  void release(std::int32_t page);  ///< undoes `retain`; to be called from a sequence's last page to its first

  /// Evicts up to `count` cached pages, least recently used leaves first. Returns the number of evicted pages.
  std::int32_t evict(std::int32_t count);

  /// Counts a match that a sequence uses: `path` from a root downwards.
  void count_match(std::span<const std::int32_t> path);

  /// Returns up to `count` prefixes at which matches ended, most hits first. They are chosen from 64 candidates, so the
  /// cost does not depend on the size of the tree; they are exact unless that many hotter ones have been evicted.
  std::vector<HotPrefix> hottest(std::size_t count) const;

  bool contains(std::int32_t page) const { return nodes_[page].parent != kNone; }
  bool cached(std::int32_t page) const { return contains(page) && pool_.references(page) == 1; }
  std::int32_t size() const { return size_; }            ///< number of pages
  std::int32_t cached_pages() const { return cached_; }  ///< pages that only the tree holds
  std::int64_t num_evicted() const { return num_evicted_; }

  /// A page of the tree as it is now, for those that look at all of it.
  struct View {
    std::int32_t parent;      ///< a page, or a root; kNone: not in the tree
    std::uint32_t hits;       ///< matches that included it
    std::int64_t generation;  ///< number of prefixes that the page has held before, modulo 2^21
  };
  View view(std::int32_t page) const {
    return {nodes_[page].parent, nodes_[page].hits, std::int64_t{nodes_[page].generation}};
  }
  std::int32_t total() const { return static_cast<std::int32_t>(nodes_.size()); }  ///< pages of the pool
  std::int32_t depth(std::int32_t page) const { return nodes_[page].depth; }       ///< pages from the root to it
  std::int32_t next_evicted() const { return first_; }                             ///< next page to evict, or kNone

  void add_watch(PrefixWatch& watch) { watches_.push_back(&watch); }       ///< begins to tell it what comes and goes,
  void remove_watch(PrefixWatch& watch) { std::erase(watches_, &watch); }  ///< and ends

  /// Returns the tokens of a page, which are valid until the tree changes.
  std::span<const std::int32_t> tokens_of(std::int32_t page) const {
    return tokens_.subspan(static_cast<std::size_t>(page) * static_cast<std::size_t>(block_size_),
                           static_cast<std::size_t>(block_size_));
  }

  /// Roots are numbered from `kNone - 1` downwards, and these are their indices.
  static std::size_t root_index(std::int32_t root) { return static_cast<std::size_t>(-2 - root); }
  std::size_t num_roots() const { return roots_.size(); }  ///< number of roots, unused ones included
  const PrefixKey& key_of(std::int32_t root) const { return roots_[root_index(root)].key; }
  PrefixKey key_of(const std::string& salt) const { return root_key(model_, salt); }
  std::int32_t find_root(const PrefixKey& key) const;                          ///< a root that is in use, or kNone
  std::int32_t root_of(std::int32_t page) const { return page_roots_[page]; }  ///< of a page of the tree
  bool is_salted(std::int32_t root) const { return key_of(root) != key_of(""); }

  /// Returns the indices of `ends` (last pages of paths, or kNone for empty paths) in depth-first order: at each page
  /// the branch with the longest of these paths first, and a longer path before a shorter one.
  std::vector<std::int32_t> depth_first(std::span<const std::int32_t> ends) const;

 private:
  struct Node {
    std::int32_t parent = kNone;  ///< a page, or a root; kNone: not in the tree
    std::int32_t depth = 0;       ///< pages from the root to it, inclusive
    std::uint32_t hash = 0;       ///< hash of the salt and all tokens up to the page's end
    std::int32_t chain = kNone;   ///< the next page in its bucket
    std::int32_t next = kNone;    ///< next page in the LRU list of cached pages
    std::int32_t previous = kNone;
    std::uint32_t hits = 0;             ///< matches that included it
    std::uint32_t is_hot : 1 = 0;       ///< a candidate in `hot_` ends here
    std::uint32_t generation : 21 = 0;  ///< number of prefixes that the page has held before, modulo 2^21
  };
  struct HotPath {
    std::int32_t end;
    std::int32_t first;  ///< first page, which stays in the tree as long as `end`
  };
  struct Root {
    PrefixKey key;
    std::int64_t uses = 0;  ///< open calls of `enter`, and pages right below it
  };

  bool is_root(std::int32_t root) const {
    return root < kNone && root_index(root) < roots_.size() && roots_[root_index(root)].uses > 0;
  }
  std::int32_t* bucket(std::uint32_t hash) { return &buckets_[hash & (buckets_.size() - 1)]; }
  std::int32_t enter_key(const PrefixKey& key);
  void take_over();
  void add(std::int32_t page, std::int32_t parent, std::uint32_t hash);
  std::int32_t find(std::int32_t parent, const std::int32_t* tokens, std::uint32_t hash) const;
  void check_parent(std::int32_t parent) const;
  void check_in_tree(std::int32_t page) const;
  std::uint32_t hash_of(std::int32_t parent) const;
  std::uint32_t extend(std::uint32_t prefix, const std::int32_t* tokens) const;
  void prefetch(std::int32_t page) const;
  void link(std::int32_t page);
  void unlink(std::int32_t page);
  void remove(std::int32_t page);
  void add_candidate(HotPath path);
  void drop_candidate(std::int32_t page);

  PagePool& pool_;
  std::int32_t block_size_;
  PageLedger* ledger_;
  StateStore* states_;
  std::vector<PrefixWatch*> watches_;
  PrefixKey model_;
  Arena arena_;                         ///< memory on huge pages, since lookups are random accesses
  std::span<Node> nodes_;               ///< node of each page
  std::span<std::int32_t> page_roots_;  ///< root above each page of the tree
  std::span<std::int32_t> tokens_;      ///< [pages][block_size], the ledger's if there is one
  std::span<std::int32_t> buckets_;     ///< first page of each hash bucket; their number is a power of two
  std::vector<Root> roots_;
  std::vector<std::int32_t> free_roots_;
  std::map<PrefixKey, std::int32_t> root_of_;
  std::vector<HotPath> hot_;                   ///< candidates for `hottest`
  std::uint32_t least_hits_ = 0;               ///< a path needs more hits to become a candidate
  std::int32_t first_ = kNone, last_ = kNone;  ///< ends of the LRU list
  std::int32_t size_ = 0, cached_ = 0;
  std::int64_t num_evicted_ = 0;
};

}  // namespace quire
