#include "kv_cache/prefix_outline.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <tuple>

namespace quire {
namespace {

constexpr std::int32_t kNone = RadixTree::kNone;

/// The tree from above: the branches of each page and root. A place is a page, or one of a root behind all pages.
class Branches {
 public:
  explicit Branches(const RadixTree& tree)
      : tree_(tree),
        first_(static_cast<std::size_t>(tree.total()) + tree.num_roots(), kNone),
        parent_(static_cast<std::size_t>(tree.total()), kNone),
        sibling_(static_cast<std::size_t>(tree.total()), kNone),
        count_(first_.size()),
        below_(first_.size()) {
    for (std::int32_t page = 0; page < tree.total(); ++page)
      if (tree.contains(page)) add(page);
    sum();
  }

  std::int32_t place_of(std::int32_t parent) const {
    return parent >= 0 ? parent : tree_.total() + static_cast<std::int32_t>(RadixTree::root_index(parent));
  }
  bool is_root(std::int32_t place) const { return place >= tree_.total(); }
  std::int32_t root_of(std::int32_t place) const { return -2 - (place - tree_.total()); }
  std::int32_t count(std::int32_t place) const { return count_[index(place)]; }
  std::int32_t below(std::int32_t place) const { return below_[index(place)]; }  ///< pages below a place
  std::int32_t first(std::int32_t place) const { return first_[index(place)]; }

  std::vector<std::int32_t> of(std::int32_t place) const {
    std::vector<std::int32_t> pages;
    for (std::int32_t page = first(place); page != kNone; page = sibling_[index(page)]) pages.push_back(page);
    return pages;
  }

 private:
  static std::size_t index(std::int32_t place) { return static_cast<std::size_t>(place); }

  void add(std::int32_t page) {
    parent_[index(page)] = place_of(tree_.view(page).parent);
    const std::size_t parent = index(parent_[index(page)]);
    sibling_[index(page)] = first_[parent];
    first_[parent] = page;
    ++count_[parent];
  }

  /// Counts the pages below each place, from the leaves upwards.
  void sum() {
    std::vector<std::int32_t> missing = count_;
    std::vector<std::int32_t> ready;
    for (std::int32_t page = 0; page < tree_.total(); ++page)
      if (parent_[index(page)] != kNone && count(page) == 0) ready.push_back(page);
    while (!ready.empty()) {
      const std::int32_t page = ready.back();
      ready.pop_back();
      const std::int32_t parent = parent_[index(page)];
      below_[index(parent)] += below(page) + 1;
      if (--missing[index(parent)] == 0 && !is_root(parent)) ready.push_back(parent);
    }
  }

  const RadixTree& tree_;
  std::vector<std::int32_t> first_;             ///< first page after each place, or kNone
  std::vector<std::int32_t> parent_, sibling_;  ///< place before each page; next page after that place
  std::vector<std::int32_t> count_, below_;     ///< pages right after each place; all pages below it
};

class Outline {
 public:
  Outline(const RadixTree& tree, const PagePool& pool, std::span<const std::uint8_t> states,
          const OutlineLimits& limits)
      : tree_(tree), pool_(pool), states_(states), limits_(limits), branches_(tree) {}

  std::vector<PrefixRun> make() {
    add_whole();
    for (std::size_t index = 0; index < runs_.size() && !is_full(); ++index) add_branches(index);
    return std::move(runs_);
  }

 private:
  bool is_full() const { return runs_.size() >= static_cast<std::size_t>(limits_.runs); }

  void add_whole() {
    PrefixRun whole{.id = kWholeCache, .parent = -1, .pages_below = tree_.size()};
    whole.branches = static_cast<std::int32_t>(top().size());
    add(whole, kNone, 0);
  }

  /// Returns what the cache as a whole branches into: the first pages that have no salt, and the roots of salts.
  std::vector<std::int32_t> top() const {
    std::vector<std::int32_t> places;
    for (std::size_t index = 0; index < tree_.num_roots(); ++index) {
      const std::int32_t place = tree_.total() + static_cast<std::int32_t>(index);
      if (branches_.count(place) == 0) continue;
      if (tree_.is_salted(branches_.root_of(place))) {
        places.push_back(place);
      } else {
        std::ranges::copy(branches_.of(place), std::back_inserter(places));
      }
    }
    return places;
  }

  void add_branches(std::size_t index) {
    const std::int32_t limit = limit_of(runs_[index].id, levels_[index]);
    if (limit == 0) return;
    std::vector<std::int32_t> places = ends_[index] == kNone ? top() : branches_.of(ends_[index]);
    const auto size = std::min(places.size(), static_cast<std::size_t>(limit));
    const auto rank = [this](std::int32_t place) { return std::tuple(-hits(place), -branches_.below(place), place); };
    std::ranges::partial_sort(places, places.begin() + static_cast<std::ptrdiff_t>(size), {}, rank);
    for (std::size_t number = 0; number < size && !is_full(); ++number) {
      const std::int32_t place = places[number];
      const bool is_salted = runs_[index].is_salted || branches_.is_root(place);
      if (branches_.is_root(place))
        add_salt(place, index);
      else
        add_run(place, index, is_salted);
    }
  }

  std::int32_t limit_of(std::int64_t id, std::int32_t level) const {
    const auto given = limits_.shown.find(id);
    if (given != limits_.shown.end()) return given->second;
    return level < limits_.levels ? limits_.branches : 0;
  }

  std::int64_t hits(std::int32_t place) const {
    if (!branches_.is_root(place)) return tree_.view(place).hits;
    std::int64_t sum = 0;
    for (const std::int32_t page : branches_.of(place)) sum += tree_.view(page).hits;
    return sum;
  }

  void add_salt(std::int32_t place, std::size_t parent) {
    add({.id = std::int64_t{branches_.root_of(place)},
         .parent = static_cast<std::int32_t>(parent),
         .is_salted = true,
         .hits = static_cast<std::uint32_t>(hits(place)),
         .branches = branches_.count(place),
         .pages_below = branches_.below(place)},
        place, levels_[parent] + 1);
  }

  void add_run(std::int32_t page, std::size_t parent, bool is_salted) {
    const auto [_, hits, generation] = tree_.view(page);
    PrefixRun run{.id = generation << 32 | page,
                  .parent = static_cast<std::int32_t>(parent),
                  .is_salted = is_salted,
                  .hits = hits,
                  .users = pool_.references(page) - 1};
    std::int32_t end = page;
    ++run.pages[states_[static_cast<std::size_t>(end)]];
    while (branches_.count(end) == 1) {
      end = branches_.first(end);
      ++run.pages[states_[static_cast<std::size_t>(end)]];
    }
    run.branches = branches_.count(end);
    run.pages_below = branches_.below(end);
    run.is_next_evicted = end == tree_.next_evicted();
    if (!is_salted) {
      run.first = tree_.tokens_of(page);
      if (end != page) run.last = tree_.tokens_of(end);
    }
    add(run, end, levels_[parent] + 1);
  }

  void add(const PrefixRun& run, std::int32_t end, std::int32_t level) {
    runs_.push_back(run);
    ends_.push_back(end);
    levels_.push_back(level);
  }

  const RadixTree& tree_;
  const PagePool& pool_;
  std::span<const std::uint8_t> states_;
  const OutlineLimits& limits_;
  Branches branches_;
  std::vector<PrefixRun> runs_;
  std::vector<std::int32_t> ends_, levels_;  ///< place whose branches follow each run; level of each run
};

}  // namespace

std::vector<PrefixRun> outline(const RadixTree& tree, const PagePool& pool, std::span<const std::uint8_t> states,
                               const OutlineLimits& limits) {
  if (limits.runs < 1 || limits.levels < 0 || limits.branches < 0)
    throw std::invalid_argument(
        "max_runs=" + std::to_string(limits.runs) + ", levels=" + std::to_string(limits.levels) +
        ", branches=" + std::to_string(limits.branches) + "; give at least 1 run, and no limit below 0");
  for (const auto& [id, count] : limits.shown)
    if (count < 0)
      throw std::invalid_argument("shown[" + std::to_string(id) + "]=" + std::to_string(count) + "; give at least 0");
  return Outline(tree, pool, states, limits).make();
}

}  // namespace quire
