#pragma once

#include <cstdint>
#include <optional>
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
  std::vector<PrefixKey> removed;
  std::vector<StoredRun> stored;  ///< a run comes after the one that its parent is in
};

/// Notes which pages of the prefix cache have changed, for an outline of it elsewhere. Its memory is that of a key for
/// each page, however late `take` is called: what came and went in between is not told.
class PrefixWatch {
 public:
  explicit PrefixWatch(std::int32_t pages);

  /// Notes a page that has been added or removed.
  void note(std::int32_t page);

  /// Returns the changes since the last call, in time linear in the pages that were noted but for sorting.
  PrefixChanges take(const RadixTree& tree);

 private:
  struct Told {
    PrefixKey key;
    std::int32_t root = 0;  ///< root of the prefix
    bool is_told = false;   ///< the prefix that `key` stands for has been told as stored
    bool is_noted = false;  ///< the page is in `noted_`
  };

  Told& at(std::int32_t page) { return told_[static_cast<std::size_t>(page)]; }
  void remove(std::int32_t page, PrefixChanges& changes);

  std::vector<Told> told_;
  std::vector<std::int32_t> noted_;
};

}  // namespace quire
