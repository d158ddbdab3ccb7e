#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <tuple>

#include "bindings/bind_struct.h"
#include "bindings/bindings.h"
#include "kv_cache/page_pool.h"
#include "kv_cache/radix_tree.h"
#include "kv_cache/sequences.h"

namespace nb = nanobind;

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
                           const std::optional<PoolingConfig>& pooling, std::shared_ptr<TokenConstraint> constraint) {
  return sequences.open(std::move(tokens), num_prompt_tokens, sampling == nullptr ? SamplingConfig() : *sampling,
                        cache_salt, pooling, std::move(constraint));
}

void bind_configs(nb::module_& m) {
  using Config = SamplingConfig;
  bind_struct<Access::kReadWrite>(
      m, "SamplingConfig", "Sampling parameters of one sequence; the meanings are vLLM's.",
      defaulted("temperature", &Config::temperature, "0: greedy."),
      defaulted("top_k", &Config::top_k, "0 or -1: all tokens."), defaulted("top_p", &Config::top_p),
      defaulted("min_p", &Config::min_p), defaulted("repetition_penalty", &Config::repetition_penalty),
      defaulted("presence_penalty", &Config::presence_penalty),
      defaulted("frequency_penalty", &Config::frequency_penalty), defaulted("logit_bias", &Config::logit_bias),
      defaulted("allowed_token_ids", &Config::allowed_token_ids, "Empty: all tokens."),
      defaulted("bad_words_token_ids", &Config::bad_words_token_ids),
      defaulted("stop_token_ids", &Config::stop_token_ids, "Banned until there are `min_tokens` outputs."),
      defaulted("min_tokens", &Config::min_tokens), defaulted("seed", &Config::seed),
      defaulted("logprobs", &Config::logprobs, "Likeliest tokens to report with each sampled one."),
      defaulted("prompt_logprobs", &Config::prompt_logprobs, "Likeliest tokens to report with each prompt token."));
  bind_struct<Access::kReadWrite>(
      m, "PoolingConfig", "Parameters of pooling the hidden states of a prompt into one vector.",
      defaulted("type", &PoolingConfig::type, "mean, or last."),
      defaulted("normalize", &PoolingConfig::normalize, "To length 1."),
      defaulted("dimensions", &PoolingConfig::dimensions, "Values to keep, the first ones; 0: all."));
}

std::tuple<std::int64_t, std::int32_t, std::int32_t> match_sequence(Sequences& sequences, std::int32_t slot) {
  const Sequences::Match match = sequences.match(slot);
  return {match.tokens, match.cached_pages, match.end};
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

}  // namespace

void bind_sequences(nb::module_& m) {
  bind_configs(m);
  nb::class_<PagePool>(m, "PagePool", "Pages of KV memory with a reference count each.")
      .def(nb::init<std::int32_t, std::int32_t>(), nb::arg("num_pages"), nb::arg("extent") = PagePool::kAll)
      .def("allocate", &allocate_pages, nb::arg("count"), nb::arg("after") = Tokens(),
           "Return new pages for a sequence that has `after`, or None if fewer are free.")
      .def("retain", &PagePool::retain, nb::arg("page"))
      .def("release", &PagePool::release, nb::arg("page"))
      .def("references", nb::overload_cast<std::int32_t>(&PagePool::references, nb::const_), nb::arg("page"))
      .def_prop_ro("free_pages", &PagePool::free_pages)
      .def_prop_ro("held_pages", &PagePool::held_pages)
      .def_prop_ro("committed", &PagePool::committed)
      .def_prop_ro("total", &PagePool::total);
  nb::class_<RadixTree>(m, "RadixTree", "The prefix cache: full pages, found by the tokens that lead to them.")
      .def(nb::init<PagePool&, std::int32_t>(), nb::arg("pool"), nb::arg("page_size"), nb::keep_alive<1, 2>())
      .def("enter", &RadixTree::enter, nb::arg("salt"),
           "Return the root of the prefixes under a salt; each call needs one of `leave`.")
      .def("leave", &RadixTree::leave, nb::arg("root"))
      .def("match", &match_tokens, nb::arg("parent"), nb::arg("tokens"),
           "Return the pages below `parent` that hold the first full pages of `tokens`.")
      .def(
          "insert",
          [](RadixTree& tree, std::int32_t parent, const Tokens& tokens, std::int32_t page) {
            return tree.insert(parent, tokens, page);
          },
          nb::arg("parent"), nb::arg("tokens"), nb::arg("page"),
          "Insert a page; return the one that the tree holds for these tokens now.")
      .def("retain", &RadixTree::retain, nb::arg("page"))
      .def("release", &RadixTree::release, nb::arg("page"))
      .def("evict", &RadixTree::evict, nb::arg("count"),
           "Drop cached pages, least recently used leaves first; return how many.")
      .def(
          "depth_first", [](const RadixTree& tree, const Tokens& ends) { return tree.depth_first(ends); },
          nb::arg("ends"), "Return the order in which to visit paths that end at these pages.")
      .def(
          "count_match", [](RadixTree& tree, const Tokens& path) { tree.count_match(path); }, nb::arg("path"),
          "Count a match that a sequence uses: its pages from a root downwards.")
      .def(
          "hottest", &hottest, nb::arg("count"),
          "Return the paths that the most sequences have found: hits, pages, sequences that hold it now, whether it is "
          "salted, tokens of the first page and, unless that is the same one, of the last.")
      .def_prop_ro("size", &RadixTree::size)
      .def_prop_ro("cached_pages", &RadixTree::cached_pages)
      .def_prop_ro("num_evicted", &RadixTree::num_evicted);
  nb::class_<Sequences>(m, "Sequences", "Open sequences, and the KV pages that they and the prefix cache have.")
      .def(nb::init<std::int32_t, std::int32_t, std::int32_t>(), nb::arg("num_pages"), nb::arg("page_size"),
           nb::arg("vocab_size"))
      .def("open", &open_sequence, nb::arg("token_ids"), nb::arg("num_prompt_tokens"), nb::kw_only(),
           nb::arg("sampling").none() = nb::none(), nb::arg("cache_salt").none() = nb::none(),
           nb::arg("pooling").none() = nb::none(), nb::arg("constraint").none() = nb::none(),
           "Return the slot of a new sequence. It shares its pages under its salt; without one it shares none. With "
           "`pooling` its hidden states are pooled, and no token is sampled.")
      .def("match", &match_sequence, nb::arg("slot"),
           "Return the number of tokens that the prefix cache holds, the number of their pages that no sequence holds, "
           "and the last of these pages or -1.")
      .def("start", &Sequences::start, nb::arg("slot"), nb::arg("num_tokens"),
           "Give a slot its first pages; return the number of tokens that they hold already, or None if too few are "
           "free.")
      .def("reserve", &Sequences::reserve, nb::arg("slot"), nb::arg("num_tokens"))
      .def("share", &Sequences::share, nb::arg("slot"), nb::arg("num_computed"))
      .def(
          "append", [](Sequences& s, std::int32_t slot, std::int32_t token) { s.at(slot).append(token); },
          nb::arg("slot"), nb::arg("token_id"))
      .def("truncate", &Sequences::truncate, nb::arg("slot"), nb::arg("num_tokens"), nb::kw_only(),
           nb::arg("recompute_last") = true,
           "Keep the first tokens, and the pages that hold them, without the one that is written next if others have "
           "it too: that of the last token, or with recompute_last=False of the token after it, which the caller "
           "appends. Return the number of positions whose pages are left.")
      .def("fork", &Sequences::fork, nb::arg("slot"), nb::arg("source"), nb::arg("num_computed"), nb::arg("num_tokens"),
           "Give a slot the first pages of another; the page in which the two diverge is still to be copied: see "
           "Runner.fork.")
      .def("shared", &Sequences::shared, nb::arg("slot"),
           "Return the number of tokens in pages that others may find, and the last of these pages or -1.")
      .def("private_pages", &Sequences::private_pages, nb::arg("slot"),
           "Return the number of pages that no other sequence holds.")
      .def(
          "page_map", &page_map, nb::arg("pinned"), nb::arg("max_cells"),
          "Return a map of the pool, where `pinned` are slots: pages of each state (free, held by one, shared, cached, "
          "pinned), pages a cell, and bytes: the state of each page, or [cells][5] shares of 255.")
      .def("release_pages", &Sequences::release_pages, nb::arg("slot"))
      .def("close", &Sequences::close, nb::arg("slot"))
      .def(
          "num_tokens", [](Sequences& s, std::int32_t slot) { return s.at(slot).tokens.size(); }, nb::arg("slot"))
      .def(
          "tokens", [](Sequences& s, std::int32_t slot) { return s.at(slot).tokens; }, nb::arg("slot"))
      .def(
          "pages", [](Sequences& s, std::int32_t slot) { return s.at(slot).pages; }, nb::arg("slot"))
      .def_prop_ro("tree", &Sequences::tree, nb::rv_policy::reference_internal)
      .def_prop_ro("free_pages", &Sequences::free_pages)
      .def_prop_ro("cached_pages", &Sequences::cached_pages)
      .def_prop_ro("held_pages", &Sequences::held_pages);
}

}  // namespace quire
