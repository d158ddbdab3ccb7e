#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "compute/arena.h"
#include "kv_cache/page_pool.h"

namespace quire {

/// A path of the tree that many sequences have found.
struct HotPrefix {
  std::uint32_t hits;                   ///< sequences that found its last page, and so all
  std::int32_t pages;                   ///< how long it is
  std::int32_t users;                   ///< sequences that have it now
  bool is_salted;                       ///< not for all to find, and perhaps not to see
  std::span<const std::int32_t> first;  ///< tokens of its first page; both spans hold until the tree changes
  std::span<const std::int32_t> last;   ///< of its last page; none if that is the first
};

/// The prefix cache: full pages of KV memory, found by the tokens that they and all pages before them hold.
///
/// A node is a page: its edge is the page's tokens, its parent the page before it, or the root of a salt; so an edge
/// never has to be split, and a page's number is its node's. Tokens are compared, not only hashed.
///
/// The tree has a reference to each of its pages. A page that a sequence has too is locked; since a sequence has all
/// pages before one of its own, locks reach up to the root. The others, the cached pages, stand in a list in the order
/// in which they were let go, each path from its leaf to its root: so no page stands after one that lies above it, and
/// the first is always a leaf, and the one that was used least recently.
///
/// No operation costs more than the pages and tokens that it touches. Not thread-safe: the step loop owns it.
class RadixTree {
 public:
  static constexpr std::int32_t kNone = -1;

  RadixTree(PagePool& pool, std::int32_t page_size);
  RadixTree(const RadixTree&) = delete;
  RadixTree& operator=(const RadixTree&) = delete;

  /// The root of the prefixes under `salt`, below zero; those of other salts are never found from it. Each call is to
  /// be matched by one of `leave`: a root lives while it is in use or has pages below it.
  std::int32_t enter(const std::string& salt);
  void leave(std::int32_t root);

  /// Appends to `pages` those below `parent`, a root or a page of the tree, that hold the first full pages of `tokens`.
  void match(std::int32_t parent, std::span<const std::int32_t> tokens, std::vector<std::int32_t>& pages) const;

  /// Takes a page, which the caller has, into the tree below `parent`, by the tokens that fill it. Returns the page
  /// that the tree holds for them: another one if they were there already, which the caller should then have instead.
  std::int32_t insert(std::int32_t parent, std::span<const std::int32_t> tokens, std::int32_t page);

  void retain(std::int32_t page);   ///< one more sequence has the page, of the tree or not
  void release(std::int32_t page);  ///< one less; to be called from a sequence's last page to its first

  /// Drops cached pages, least recently used leaves first, until `count` are gone or none is left; returns how many.
  std::int32_t evict(std::int32_t count);

  /// A sequence has found the pages of `path`, from a root downwards, and goes on with them. One write a page.
  void count_match(std::span<const std::int32_t> path);

  /// Up to `count` paths at which matches ended, most hits first. As many as 64 are kept to choose from, so it costs
  /// the same in every tree; those it names are the hottest unless so many hotter ones were evicted meanwhile.
  std::vector<HotPrefix> hottest(std::size_t count) const;

  bool contains(std::int32_t page) const { return nodes_[page].parent != kNone; }
  bool cached(std::int32_t page) const { return contains(page) && pool_.references(page) == 1; }
  std::int32_t size() const { return size_; }            ///< pages of the tree
  std::int32_t cached_pages() const { return cached_; }  ///< pages that only the tree has
  std::int64_t num_evicted() const { return num_evicted_; }

  /// The places of `ends`, last pages of paths or kNone for empty ones, in depth-first order: at each page first the
  /// branch in which the longest of these paths lies, and the longer of two paths before the shorter.
  std::vector<std::int32_t> depth_first(std::span<const std::int32_t> ends) const;

 private:
  struct Node {
    std::int32_t parent = kNone;  ///< a page, or a root; kNone: not in the tree
    std::int32_t depth = 0;       ///< pages from the root, itself included
    std::uint32_t hash = 0;       ///< of all tokens up to its end, and the salt
    std::int32_t chain = kNone;   ///< the next page in its bucket
    std::int32_t next = kNone;    ///< in the list of cached pages
    std::int32_t previous = kNone;
    std::uint32_t hits = 0;  ///< matches that found it
    bool is_hot = false;     ///< an entry of `hot_` ends here
  };
  struct HotPath {
    std::int32_t end;
    std::int32_t first;  ///< page, which stays as long as `end` does
  };
  struct Root {
    std::string salt;
    std::int64_t uses = 0;  ///< by `enter`, and pages right below
  };

  static std::size_t root_index(std::int32_t root) { return static_cast<std::size_t>(-2 - root); }
  std::int32_t* bucket(std::uint32_t hash) { return &buckets_[hash & (buckets_.size() - 1)]; }
  std::int32_t find(std::int32_t parent, const std::int32_t* tokens, std::uint32_t hash) const;
  std::uint32_t hash_of(std::int32_t parent) const;
  std::uint32_t extend(std::uint32_t prefix, const std::int32_t* tokens) const;
  void prefetch(std::int32_t page) const;
  void link(std::int32_t page);
  void unlink(std::int32_t page);
  void remove(std::int32_t page);
  void admit(HotPath path);
  void cool(std::int32_t page);
  std::span<const std::int32_t> tokens_of(std::int32_t page) const {
    return tokens_.subspan(static_cast<std::size_t>(page) * static_cast<std::size_t>(page_size_),
                           static_cast<std::size_t>(page_size_));
  }

  PagePool& pool_;
  std::int32_t page_size_;
  Arena arena_;                      ///< on huge pages, since every look goes to another place
  std::span<Node> nodes_;            ///< by page
  std::span<std::int32_t> tokens_;   ///< [pages][page_size]
  std::span<std::int32_t> buckets_;  ///< first page of each; a power of two of them, so that chains are short
  std::vector<Root> roots_;
  std::vector<std::int32_t> free_roots_;
  std::map<std::string, std::int32_t> root_of_;
  std::vector<HotPath> hot_;                   ///< candidates for the hottest
  std::uint32_t least_hits_ = 0;               ///< no candidate has fewer, and who has no more than these is none
  std::int32_t first_ = kNone, last_ = kNone;  ///< of the cached pages
  std::int32_t size_ = 0, cached_ = 0;
  std::int64_t num_evicted_ = 0;
};

}  // namespace quire
