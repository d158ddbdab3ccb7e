#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/unordered_map.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <tuple>
#include <unordered_map>

#include "bindings/bind_struct.h"
#include "bindings/bindings.h"
#include "kv_cache/page_pool.h"
#include "kv_cache/prefix_watch.h"
#include "kv_cache/radix_tree.h"
#include "kv_cache/sequences.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace quire {
namespace {

using Tokens = std::vector<std::int32_t>;

std::optional<Tokens> allocate_pages(PagePool& pool, std::int32_t count, Tokens pages) {
  const std::size_t before = pages.size();
  if (!pool.allocate(count, pages)) return std::nullopt;
  return Tokens(pages.begin() + static_cast<std::ptrdiff_t>(before), pages.end());
}

Tokens match_tokens(const RadixTree& tree, std::int32_t parent, const Tokens& tokens) {
  Tokens pages;
  tree.match(parent, tokens, pages);
  return pages;
}

std::int32_t open_sequence(Sequences& sequences, Tokens tokens, std::int64_t num_prompt_tokens,
                           const SamplingConfig* sampling, const std::optional<std::string>& cache_salt,
                           const std::optional<PoolingConfig>& pooling, std::shared_ptr<TokenConstraint> constraint,
                           std::int64_t segment) {
  return sequences.open(std::move(tokens), num_prompt_tokens, sampling == nullptr ? SamplingConfig() : *sampling,
                        cache_salt, pooling, std::move(constraint), segment);
}

void bind_configs(nb::module_& m) {
  using Config = SamplingConfig;
  bind_struct(
      m, "SamplingConfig", "Sampling parameters of one sequence; the meanings are vLLM's.",
      option("temperature", &Config::temperature, "0: greedy."),
      option("top_k", &Config::top_k, "0 or -1: all tokens."), option("top_p", &Config::top_p),
      option("min_p", &Config::min_p), option("repetition_penalty", &Config::repetition_penalty),
      option("presence_penalty", &Config::presence_penalty), option("frequency_penalty", &Config::frequency_penalty),
      option("logit_bias", &Config::logit_bias),
      option("allowed_token_ids", &Config::allowed_token_ids, "Empty: all tokens."),
      option("bad_words_token_ids", &Config::bad_words_token_ids),
      option("stop_token_ids", &Config::stop_token_ids, "Banned until there are `min_tokens` outputs."),
      option("min_tokens", &Config::min_tokens), option("seed", &Config::seed),
      option("first_position", &Config::first_position),
      option("logprobs", &Config::logprobs, "Likeliest tokens to report with each sampled one."),
      option("prompt_logprobs", &Config::prompt_logprobs, "Likeliest tokens to report with each prompt token."));
  bind_struct(m, "PoolingConfig", "Pooling of the hidden states of a prompt into one vector.",
              option("type", &PoolingConfig::type, "last, mean, cls or max."),
              option("normalize", &PoolingConfig::normalize, "To length 1."),
              option("dimensions", &PoolingConfig::dimensions, "Values to keep, the first ones; 0: all."),
              option("skipped", &PoolingConfig::skipped, "Tokens at the beginning that mean and max leave out."),
              option("head", &PoolingConfig::head, "Apply the model's pooling head."),
              option("activation", &PoolingConfig::activation, "Of the final values: empty, sigmoid or softmax."));
}

std::tuple<std::int64_t, std::int32_t, std::int32_t> match_sequence(Sequences& sequences, std::int32_t slot) {
  const Sequences::Match match = sequences.match(slot);
  return {match.tokens, match.cached_pages, match.end};
}

PrefixKey key_of(const nb::bytes& key) {
  PrefixKey value;
  if (key.size() != value.size())
    throw std::invalid_argument("a key of " + std::to_string(key.size()) + " bytes; it must have " +
                                std::to_string(value.size()));
  std::memcpy(value.data(), key.c_str(), value.size());
  return value;
}

std::vector<nb::bytes> prefix_keys(Sequences& sequences, std::int32_t slot) {
  std::vector<nb::bytes> keys;
  for (const PrefixKey& key : sequences.keys(slot)) keys.push_back(bytes_of(key));
  return keys;
}

using HotPrefixTuple = std::tuple<std::uint32_t, std::int32_t, std::int32_t, bool, Tokens, Tokens>;

std::vector<HotPrefixTuple> hottest(const RadixTree& tree, std::int32_t count) {
  std::vector<HotPrefixTuple> prefixes;
  for (const HotPrefix& prefix : tree.hottest(static_cast<std::size_t>(std::max(count, 0))))
    prefixes.emplace_back(prefix.hits, prefix.pages, prefix.users, prefix.is_salted,
                          Tokens(prefix.first.begin(), prefix.first.end()),
                          Tokens(prefix.last.begin(), prefix.last.end()));
  return prefixes;
}

std::tuple<Tokens, std::int32_t, nb::bytes> page_map(Sequences& sequences, const Tokens& pinned,
                                                     std::int32_t max_cells) {
  const PageMap map = sequences.page_map(pinned, max_cells);
  return {Tokens(map.pages.begin(), map.pages.end()), map.pages_per_cell,
          nb::bytes(map.cells.data(), map.cells.size())};
}

using PrefixRunTuple = std::tuple<std::int64_t, std::int32_t, bool, std::uint32_t, std::int32_t, Tokens, std::int32_t,
                                  std::int32_t, bool, Tokens, Tokens>;

std::vector<PrefixRunTuple> outline_runs(Sequences& sequences, const Tokens& pinned, std::int32_t max_runs,
                                         std::int32_t levels, std::int32_t branches,
                                         const std::unordered_map<std::int64_t, std::int32_t>& shown) {
  std::vector<PrefixRun> runs;
  {
    nb::gil_scoped_release release;
    runs = sequences.outline(pinned, {max_runs, levels, branches, shown});
  }
  std::vector<PrefixRunTuple> tuples;
  for (const PrefixRun& run : runs)
    tuples.emplace_back(run.id, run.parent, run.is_salted, run.hits, run.users,
                        Tokens(run.pages.begin(), run.pages.end()), run.branches, run.pages_below, run.is_next_evicted,
                        Tokens(run.first.begin(), run.first.end()), Tokens(run.last.begin(), run.last.end()));
  return tuples;
}

}  // namespace

void bind_sequences(nb::module_& m) {
  bind_configs(m);
  nb::class_<PagePool>(m, "PagePool", "Pages of KV memory with a reference count each.")
      .def(nb::init<std::int32_t, std::int32_t>(), "num_pages"_a, "extent"_a = PagePool::kAll)
      .def("allocate", &allocate_pages, "count"_a, "after"_a = Tokens(),
           "Return new pages for a sequence that has `after`, or None if fewer are free.")
      .def("retain", &PagePool::retain, "page"_a)
      .def("release", &PagePool::release, "page"_a)
      .def("references", nb::overload_cast<std::int32_t>(&PagePool::references, nb::const_), "page"_a)
      .def_prop_ro("free_pages", &PagePool::free_pages)
      .def_prop_ro("held_pages", &PagePool::held_pages)
      .def_prop_ro("committed", &PagePool::committed)
      .def_prop_ro("total", &PagePool::total);
  nb::class_<RadixTree>(m, "RadixTree", "The prefix cache: full pages, found by the tokens that lead to them.")
      .def(nb::init<PagePool&, std::int32_t>(), "pool"_a, "block_size"_a, nb::keep_alive<1, 2>())
      .def("enter", &RadixTree::enter, "salt"_a,
           "Return the root of the prefixes under a salt; each call needs one of `leave`.")
      .def("leave", &RadixTree::leave, "root"_a)
      .def("match", &match_tokens, "parent"_a, "tokens"_a,
           "Return the pages below `parent` that hold the first full pages of `tokens`.")
      .def(
          "insert",
          [](RadixTree& tree, std::int32_t parent, const Tokens& tokens, std::int32_t page) {
            return tree.insert(parent, tokens, page);
          },
          "parent"_a, "tokens"_a, "page"_a, "Insert a page; return the one that the tree holds for these tokens now.")
      .def("retain", &RadixTree::retain, "page"_a)
      .def("release", &RadixTree::release, "page"_a)
      .def("evict", &RadixTree::evict, "count"_a,
           "Drop cached pages, least recently used leaves first; return how many.")
      .def(
          "depth_first", [](const RadixTree& tree, const Tokens& ends) { return tree.depth_first(ends); }, "ends"_a,
          "Return the order in which to visit paths that end at these pages.")
      .def(
          "count_match", [](RadixTree& tree, const Tokens& path) { tree.count_match(path); }, "path"_a,
          "Count a match that a sequence uses: its pages from a root downwards.")
      .def(
          "hottest", &hottest, "count"_a,
          "Return the paths that the most sequences have found: hits, pages, sequences that hold it now, whether it is "
          "salted, tokens of the first page and, unless that is the same one, of the last.")
      .def(
          "watch", [](RadixTree& tree) { return std::make_unique<PrefixWatch>(tree, true); }, nb::keep_alive<0, 1>(),
          "Return a watch of the prefixes under all salts, which has all pages that are there to tell.")
      .def(
          "watch_salts", [](RadixTree& tree) { return std::make_unique<PrefixWatch>(tree, false); },
          nb::keep_alive<0, 1>(), "Return a watch of the prefixes under those salts that are added to it.")
      .def_prop_ro("size", &RadixTree::size)
      .def_prop_ro("cached_pages", &RadixTree::cached_pages)
      .def_prop_ro("num_evicted", &RadixTree::num_evicted);
  nb::class_<Sequences>(m, "Sequences", "Open sequences, and the KV pages that they and the prefix cache have.")
      .def(
          "__init__",
          [](Sequences* s, std::int32_t num_pages, std::int32_t block_size, std::int32_t vocab_size,
             const StateShape* state) {
            new (s) Sequences(num_pages, block_size, vocab_size, PagePool::kAll, nullptr,
                              state == nullptr ? StateShape() : *state);
          },
          "num_pages"_a, "block_size"_a, "vocab_size"_a, "state"_a.none() = nb::none())
      .def("open", &open_sequence, "token_ids"_a, "num_prompt_tokens"_a, nb::kw_only(),
           "sampling"_a.none() = nb::none(), "cache_salt"_a.none() = nb::none(), "pooling"_a.none() = nb::none(),
           "constraint"_a.none() = nb::none(), "segment"_a = 0,
           "Return the slot of a new sequence. It shares its pages under its salt; without one it shares none. With "
           "`pooling` its hidden states are pooled, and no token is sampled. `segment` is where its second segment "
           "begins.")
      .def(
          "open_branch",
          [](Sequences& s, std::int32_t source, std::int64_t num_tokens, const Tokens& others) {
            return s.open_branch(source, num_tokens, others);
          },
          "source"_a, "num_tokens"_a, "others"_a,
          "Return the slot of a new sequence with the first tokens of another and others after them, which is sampled "
          "by "
          "the same parameters.")
      .def("set_adapter", &Sequences::set_adapter, "slot"_a, "adapter"_a,
           "Let the adapter of this number compute a slot that has no pages yet; 0: none.")
      .def("match", &match_sequence, "slot"_a,
           "Return the number of tokens that the prefix cache holds, the number of their pages that no sequence holds, "
           "and the last of these pages or -1.")
      .def("start", &Sequences::start, "slot"_a, "num_tokens"_a,
           "Give a slot its first pages; return the number of tokens that they hold already, or None if too few are "
           "free.")
      .def("hold_match", &Sequences::hold_match, "slot"_a,
           "Keep the pages of a slot's prefix match, which may have grown since the last call; return the number of "
           "their tokens. The slot has no other pages.")
      .def("reserve", &Sequences::reserve, "slot"_a, "num_tokens"_a)
      .def("num_reserved_tokens", &Sequences::num_reserved_tokens, "slot"_a,
           "Return the number of positions that the slot's pages cover.")
      .def(
          "pages_lacked",
          [](const Sequences& s, const Tokens& slots, const std::vector<std::int64_t>& num_tokens) {
            return s.pages_lacked(slots, num_tokens);
          },
          "slots"_a, "num_tokens"_a, "Return the number of pages that slots lack to cover so many positions each.")
      .def("num_computed_tokens", &Sequences::num_computed_tokens, "slot"_a,
           "Return the number of the slot's first tokens that are computed.")
      .def(
          "prefilling", [](const Sequences& s, const Tokens& slots) { return s.prefilling(slots); }, "slots"_a,
          "Return the indices of the slots in prefill: not all of the prompt, or of the tokens but the last, is "
          "computed.")
      .def(
          "growing", [](const Sequences& s, const Tokens& slots) { return s.growing(slots); }, "slots"_a,
          "Return the indices of the slots whose pages do not cover their tokens.")
      .def(
          "share",
          [](Sequences& s, std::int32_t slot, std::int64_t num_computed, const std::vector<std::uint64_t>& contents) {
            s.share(slot, num_computed, contents);
          },
          "slot"_a, "num_computed"_a, "contents"_a = std::vector<std::uint64_t>(),
          "Note that the first tokens are computed, and put their full pages into the prefix cache; `contents` "
          "are the checksums of their KV, as Runner.read_page returns them, from the first page on that is not there "
          "yet.")
      .def("resume", &Sequences::resume, "slot"_a, "num_computed"_a,
           "Return from which token on a slot is to be computed after a fork or a step: num_computed, or that to which "
           "its state has to go back; the pages after that are given back.")
      .def(
          "write_states",
          [](Sequences& s, std::int32_t slot, std::int64_t start, std::int64_t end, std::int64_t certain) {
            const StatePath path = s.write_states(slot, start, end, certain);
            std::vector<std::pair<std::int64_t, std::int32_t>> writes;
            for (const auto& [length, record] : path.writes) writes.emplace_back(length, record);
            return std::pair(path.from, std::move(writes));
          },
          "slot"_a, "start"_a, "end"_a, "certain"_a,
          "Begin a step that computes tokens [start, end), of which those from `certain` on may be taken back; `share` "
          "ends it. Return the record of the state to read, -1 for zeros, and (length, record) of those to write.")
      .def("keys", &prefix_keys, "slot"_a,
           "Return the keys of the prefixes that `match` may find: of the empty one, and of those that full pages end; "
           "none for a sequence that shares no pages.")
      .def(
          "state_keys",
          [](const Sequences& s, const nb::bytes& key, std::int32_t most) {
            std::vector<nb::bytes> keys;
            for (const PrefixKey& each : s.state_keys(key_of(key), most)) keys.push_back(bytes_of(each));
            return keys;
          },
          "key"_a, "most"_a = std::numeric_limits<std::int32_t>::max(),
          "Return the keys of the pieces of the state after a prefix, by its key; none for a model without state.")
      .def("state_pages", &Sequences::state_pages, "slot"_a,
           "Return the numbers, after those of the pages, of the pieces of the slot's state; none if it has none.")
      .def(
          "share_filled",
          [](Sequences& s, std::int32_t slot, std::int64_t num_tokens, const std::vector<std::uint64_t>& contents) {
            s.share_filled(slot, num_tokens, contents);
          },
          "slot"_a, "num_tokens"_a, "contents"_a,
          "Put pages that have been filled, and the state after them in the slot's record, into the prefix cache.")
      .def("append", &Sequences::append, "slot"_a, "token_id"_a)
      .def("truncate", &Sequences::truncate, "slot"_a, "num_tokens"_a, nb::kw_only(), "recompute_last"_a = true,
           "Keep the first tokens, and the pages that hold them, without the one that is written next if others have "
           "it too: that of the last token, or with recompute_last=False of the token after it, which the caller "
           "appends. Return the number of positions whose pages are left.")
      .def("fork", &Sequences::fork, "slot"_a, "source"_a, "num_computed"_a, "num_tokens"_a,
           "Give a slot the first pages of another; the page in which the two diverge is still to be copied: see "
           "Runner.fork.")
      .def("shared", &Sequences::shared, "slot"_a,
           "Return the number of tokens in pages that others may find, and the last of these pages or -1.")
      .def("private_pages", &Sequences::private_pages, "slot"_a,
           "Return the number of pages that no other sequence holds.")
      .def(
          "page_map", &page_map, "pinned"_a, "max_cells"_a,
          "Return a map of the pool, where `pinned` are slots: pages of each state (free, held by one, shared, cached, "
          "pinned), pages a cell, and bytes: the state of each page, or [cells][5] shares of 255.")
      .def(
          "outline", &outline_runs, "pinned"_a, nb::kw_only(), "max_runs"_a, "levels"_a, "branches"_a,
          "shown"_a = std::unordered_map<std::int64_t, std::int32_t>(),
          "Return a part of the prefix cache as a tree of runs, which are pages without a branch between them, parents "
          "first; `pinned` are slots. To `levels` levels each has up to `branches` branches, those with the most hits, "
          "and those of `shown`, by id, have that many. Run 0 is the cache as a whole, and a salt is a run without "
          "pages. Each is a tuple: id, index of the parent or -1, whether it is salted, hits, sequences that hold its "
          "first page now, numbers of pages in each state as in `page_map`, branches, pages below it, whether its last "
          "page is evicted next, tokens of its first page and, unless that is the same one, of its last; salted ones "
          "have no tokens.")
      .def("release_pages", &Sequences::release_pages, "slot"_a)
      .def("close", &Sequences::close, "slot"_a)
      .def(
          "num_tokens", [](Sequences& s, std::int32_t slot) { return s.at(slot).tokens.size(); }, "slot"_a)
      .def(
          "tokens", [](Sequences& s, std::int32_t slot) { return s.at(slot).tokens; }, "slot"_a)
      .def(
          "tail",
          [](Sequences& s, std::int32_t slot, std::int64_t start) {
            const Tokens& tokens = s.at(slot).tokens;
            return Tokens(tokens.begin() + std::clamp<std::int64_t>(start, 0, std::ssize(tokens)), tokens.end());
          },
          "slot"_a, "start"_a, "Return the tokens from number `start` on.")
      .def(
          "pages", [](Sequences& s, std::int32_t slot) { return s.at(slot).pages; }, "slot"_a)
      .def_prop_ro("tree", &Sequences::tree, nb::rv_policy::reference_internal)
      .def_prop_ro("states", &Sequences::states, nb::rv_policy::reference_internal,
                   nb::sig("def states(self) -> StateStore | None"), "None if the model has no state.")
      .def_prop_ro("free_pages", &Sequences::free_pages)
      .def_prop_ro("cached_pages", &Sequences::cached_pages)
      .def_prop_ro("held_pages", &Sequences::held_pages);
}

}  // namespace quire
