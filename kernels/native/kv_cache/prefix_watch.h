#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "kv_cache/prefix_key.h"

namespace quire {

class RadixTree;

/// Pages that follow one another in the prefix cache, and are new there.
struct StoredRun {
  std::optional<PrefixKey> parent;   ///< key of the prefix before them; empty if there is none
  PrefixKey root;                    ///< key of the empty prefix under their salt
  bool is_salted;                    ///< they have a salt, so their tokens may be private
  std::vector<PrefixKey> keys;       ///< key of the prefix that ends with each page
  std::vector<std::int32_t> tokens;  ///< tokens of all pages
};

/// What has changed in the prefix cache. Those who remove first, and then add in order, have what the cache has.
struct PrefixChanges {
  std::vector<PrefixKey> removed;  ///< a prefix comes after those that extend it
  std::vector<StoredRun> stored;   ///< a run comes after the one that its parent is in
};

/// Follows the prefix cache, for an outline of it elsewhere: notes pages that come and go, and tells them when it is
/// asked. Its memory is that of two keys for each page at most, however seldom that is: what came and went meanwhile is
/// not told.
///
/// Each page below a watched root is noted or told, in the order in which they have come. So a page is told after the
/// one before it, and all that is told can be found, even if there is more to tell.
class PrefixWatch {
 public:
  static constexpr std::int32_t kNone = -1;

  /// Watches the prefixes under all salts, or at first under none. The tree must outlive the watch.
  PrefixWatch(RadixTree& tree, bool all_salts);
  ~PrefixWatch();
  PrefixWatch(const PrefixWatch&) = delete;
  PrefixWatch& operator=(const PrefixWatch&) = delete;

  /// Watches the prefixes under further salts. Returns the keys of their empty prefixes. Linear in the salts, and in
  /// the pages of the tree if there are any below them.
  std::vector<PrefixKey> add_salts(const std::vector<std::string>& salts);

  /// Returns changes since the last call, of `most` pages at most; further ones stay noted. Linear in these pages.
  PrefixChanges take(std::int32_t most);

  /// Returns true if `take` has changes to return.
  bool has_changes() const;

  void note_added(std::int32_t page);    ///< to be called by the tree when the page is there,
  void note_removed(std::int32_t page);  ///< and when it has gone

 private:
  enum class State : std::uint8_t { kIgnored, kNoted, kTold };
  struct Page {
    PrefixKey key;                ///< of the prefix that ends with it, if that is told
    std::int32_t next, previous;  ///< neighbours in the list of noted pages
    State state = State::kIgnored;
  };

  Page& at(std::int32_t page) { return pages_[static_cast<std::size_t>(page)]; }
  bool watches(std::int32_t page);
  void note_below(const std::vector<bool>& roots);
  void note(std::int32_t page);
  void unlink(std::int32_t page);
  void take_first(StoredRun& run);

  RadixTree& tree_;
  std::optional<std::set<PrefixKey>> salts_;  ///< keys of the watched roots; empty: all are
  std::vector<Page> pages_;
  std::int32_t first_ = kNone, last_ = kNone;  ///< ends of the list of noted pages
  std::deque<PrefixKey> removed_;              ///< prefixes that were told and have gone
};

}  // namespace quire
