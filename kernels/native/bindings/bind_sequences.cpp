#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <tuple>

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
  const Config plain;
  nb::class_<Config>(m, "SamplingConfig", "How the tokens of one sequence are sampled; the meanings are vLLM's.")
      .def(
          "__init__",
          [](Config* self, float temperature, std::int32_t top_k, float top_p, float min_p, float repetition_penalty,
             float presence_penalty, float frequency_penalty, std::vector<std::pair<std::int32_t, float>> logit_bias,
             Tokens allowed_token_ids, std::vector<Tokens> bad_words_token_ids, Tokens stop_token_ids,
             std::int32_t min_tokens, std::uint64_t seed, std::optional<std::int32_t> logprobs,
             std::optional<std::int32_t> prompt_logprobs) {
            new (self) Config{temperature,
                              top_k,
                              top_p,
                              min_p,
                              repetition_penalty,
                              presence_penalty,
                              frequency_penalty,
                              std::move(logit_bias),
                              std::move(allowed_token_ids),
                              std::move(bad_words_token_ids),
                              std::move(stop_token_ids),
                              min_tokens,
                              seed,
                              logprobs,
                              prompt_logprobs};
          },
          nb::kw_only(), nb::arg("temperature") = plain.temperature, nb::arg("top_k") = plain.top_k,
          nb::arg("top_p") = plain.top_p, nb::arg("min_p") = plain.min_p,
          nb::arg("repetition_penalty") = plain.repetition_penalty,
          nb::arg("presence_penalty") = plain.presence_penalty, nb::arg("frequency_penalty") = plain.frequency_penalty,
          nb::arg("logit_bias") = plain.logit_bias, nb::arg("allowed_token_ids") = plain.allowed_token_ids,
          nb::arg("bad_words_token_ids") = plain.bad_words_token_ids, nb::arg("stop_token_ids") = plain.stop_token_ids,
          nb::arg("min_tokens") = plain.min_tokens, nb::arg("seed") = plain.seed,
          nb::arg("logprobs").none() = nb::none(), nb::arg("prompt_logprobs").none() = nb::none())
      .def_rw("temperature", &Config::temperature, "0: greedy.")
      .def_rw("top_k", &Config::top_k, "0 or -1: all tokens.")
      .def_rw("top_p", &Config::top_p)
      .def_rw("min_p", &Config::min_p)
      .def_rw("repetition_penalty", &Config::repetition_penalty)
      .def_rw("presence_penalty", &Config::presence_penalty)
      .def_rw("frequency_penalty", &Config::frequency_penalty)
      .def_rw("logit_bias", &Config::logit_bias)
      .def_rw("allowed_token_ids", &Config::allowed_token_ids, "Empty: all tokens.")
      .def_rw("bad_words_token_ids", &Config::bad_words_token_ids)
      .def_rw("stop_token_ids", &Config::stop_token_ids, "Banned until there are `min_tokens` outputs.")
      .def_rw("min_tokens", &Config::min_tokens)
      .def_rw("seed", &Config::seed)
      .def_rw("logprobs", &Config::logprobs, nb::arg().none(), "Likeliest tokens to report with each sampled one.")
      .def_rw("prompt_logprobs", &Config::prompt_logprobs, nb::arg().none(),
              "Likeliest tokens to report with each prompt token.");
  nb::class_<PoolingConfig>(m, "PoolingConfig", "How the hidden states of a prompt become one vector.")
      .def(
          "__init__",
          [](PoolingConfig* self, std::string type, bool normalize, std::int32_t dimensions) {
            new (self) PoolingConfig{std::move(type), normalize, dimensions};
          },
          nb::kw_only(), nb::arg("type") = "last", nb::arg("normalize") = true, nb::arg("dimensions") = 0)
      .def_rw("type", &PoolingConfig::type, "mean, or last.")
      .def_rw("normalize", &PoolingConfig::normalize, "To length 1.")
      .def_rw("dimensions", &PoolingConfig::dimensions, "Values to keep, the first ones; 0: all.");
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
           "New pages for a sequence that has `after`, or None if fewer are free.")
      .def("retain", &PagePool::retain, nb::arg("page"))
      .def("release", &PagePool::release, nb::arg("page"))
      .def("references", nb::overload_cast<std::int32_t>(&PagePool::references, nb::const_), nb::arg("page"))
      .def_prop_ro("free_pages", &PagePool::free_pages)
      .def_prop_ro("held_pages", &PagePool::held_pages)
      .def_prop_ro("committed", &PagePool::committed)
      .def_prop_ro("total", &PagePool::total);
  nb::class_<RadixTree>(m, "RadixTree", "The prefix cache: full pages, found by the tokens that lead to them.")
      .def(nb::init<PagePool&, std::int32_t>(), nb::arg("pool"), nb::arg("page_size"), nb::keep_alive<1, 2>())
      .def("enter", &RadixTree::enter, nb::arg("salt"), "The root of the prefixes under a salt, to be left again.")
      .def("leave", &RadixTree::leave, nb::arg("root"))
      .def("match", &match_tokens, nb::arg("parent"), nb::arg("tokens"),
           "Pages below `parent` that hold the first full pages of `tokens`.")
      .def(
          "insert",
          [](RadixTree& tree, std::int32_t parent, const Tokens& tokens, std::int32_t page) {
            return tree.insert(parent, tokens, page);
          },
          nb::arg("parent"), nb::arg("tokens"), nb::arg("page"), "The page that the tree has for these tokens now.")
      .def("retain", &RadixTree::retain, nb::arg("page"))
      .def("release", &RadixTree::release, nb::arg("page"))
      .def("evict", &RadixTree::evict, nb::arg("count"),
           "Drops cached pages, least recently used leaves first; returns how many.")
      .def(
          "depth_first", [](const RadixTree& tree, const Tokens& ends) { return tree.depth_first(ends); },
          nb::arg("ends"), "The order in which to visit paths that end at these pages.")
      .def(
          "count_match", [](RadixTree& tree, const Tokens& path) { tree.count_match(path); }, nb::arg("path"),
          "A sequence has found these pages, from a root downwards, and goes on with them.")
      .def("hottest", &hottest, nb::arg("count"),
           "Paths that the most sequences have found: hits, pages, sequences that have it now, whether it is salted, "
           "tokens of the first page and, unless that is the same one, of the last.")
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
           "Tokens that the prefix cache holds, how many of their pages nobody has, and the last of them or -1.")
      .def("start", &Sequences::start, nb::arg("slot"), nb::arg("num_tokens"),
           "Gives a slot its first pages. Tokens that they hold already, or None if there are too few.")
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
           "Gives a slot the first pages of another; the page in which they part is still to be copied: see "
           "Runner.fork.")
      .def("shared", &Sequences::shared, nb::arg("slot"),
           "Tokens in pages that others may find, and the last of these pages or -1.")
      .def("private_pages", &Sequences::private_pages, nb::arg("slot"), "How many pages no other sequence has.")
      .def("page_map", &page_map, nb::arg("pinned"), nb::arg("max_cells"),
           "The pool as a picture, where `pinned` are slots: pages of each state (free, held by one, shared, cached, "
           "pinned), pages a cell, and bytes: the state of each page, or [cells][5] parts of 255.")
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
