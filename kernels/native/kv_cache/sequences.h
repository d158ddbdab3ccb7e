#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "grammar/token_constraint.h"
#include "kv_cache/page_map.h"
#include "kv_cache/page_pool.h"
#include "kv_cache/radix_tree.h"
#include "sampling/pooling.h"
#include "sampling/sampling_state.h"

namespace quire {

/// A sequence of tokens that the model extends: its tokens, its KV pages and how its next token is sampled.
struct Sequence {
  std::vector<std::int32_t> tokens;
  std::int64_t num_prompt_tokens;
  std::int64_t prompt_logprobs_done;  ///< prompt positions whose logprobs are out; recomputing does not repeat them
  std::vector<std::int32_t> pages;    ///< page i holds positions [i * page_size, (i + 1) * page_size)
  std::int32_t root;                  ///< of its prefixes in the tree; kNone: it finds none there and leaves none
  std::int64_t shared;                ///< so many of its first pages are the tree's
  SamplingState sampling;
  std::optional<Pooling> pooling;  ///< if its hidden states are wanted, and no token after them
  std::shared_ptr<TokenConstraint> constraint;
  std::int64_t num_followed;  ///< tokens up to the last one that the constraint has advanced past

  /// Adds an output token, or a draft of one.
  void append(std::int32_t token) {
    tokens.push_back(token);
    sampling.append(token);
  }
};

/// The open sequences and the KV pages that they and the prefix cache have. A sequence is named by its slot: a small
/// number that is handed out again once it is closed.
///
/// free_pages() + cached_pages() + held_pages() == pages().total(), always. Not thread-safe: the step loop owns it.
class Sequences {
 public:
  /// The pool opens `stripe` pages at a time, all at once by default. Throws std::invalid_argument unless both are at
  /// least 1.
  Sequences(std::int32_t num_pages, std::int32_t page_size, std::int32_t vocab_size,
            std::int32_t stripe = PagePool::kAll);
  ~Sequences();
  Sequences(const Sequences&) = delete;
  Sequences& operator=(const Sequences&) = delete;

  /// Full pages that the sequence shares with others under its `cache_salt`, or with none when it has no salt. Throws
  /// std::invalid_argument when tokens or sampling are of no use.
  std::int32_t open(std::vector<std::int32_t> tokens, std::int64_t num_prompt_tokens, SamplingConfig sampling,
                    const std::optional<std::string>& cache_salt,
                    const std::optional<PoolingConfig>& pooling = std::nullopt,
                    std::shared_ptr<TokenConstraint> constraint = nullptr);

  /// What the prefix cache holds of the slot's tokens now. At least one token is always left to compute, and every
  /// prompt token whose logprobs are still to be told, or whose hidden state is still to be pooled.
  struct Match {
    std::int64_t tokens = 0;
    std::int32_t cached_pages = 0;        ///< of the pages that hold them, those that nobody has
    std::int32_t end = RadixTree::kNone;  ///< the last of the pages
  };
  Match match(std::int32_t slot);

  /// Gives a slot without pages those that the prefix cache holds of its tokens, and more to cover `num_tokens`
  /// positions. Returns the tokens that are computed already; nothing, and changes nothing, when the pool lacks pages.
  std::optional<std::int64_t> start(std::int32_t slot, std::int64_t num_tokens);

  /// Gives a slot without pages the first `num_computed` positions of `source`, where both have the same tokens and
  /// `source` has computed them, and more to cover `num_tokens` positions. The full pages are shared; the page in which
  /// the two part is a new one, into which the caller copies what stands in it. False, and changes nothing, when the
  /// pool lacks pages. Throws std::invalid_argument when the tokens or the salts differ.
  bool fork(std::int32_t slot, std::int32_t source, std::int64_t num_computed, std::int64_t num_tokens);

  /// Makes the slot's pages cover `num_tokens` positions: all of them, or none and false when the pool lacks pages.
  bool reserve(std::int32_t slot, std::int64_t num_tokens);

  /// Keeps the first `num_tokens` tokens, of which the prompt is a part; sampling state and constraint go back with
  /// them. Gives back the pages that hold none of them, and the page that holds the last one if it would have to be
  /// rewritten in part and another sequence or the prefix cache has it too: a shared page is never written. Returns the
  /// number of positions whose pages are left. Throws std::invalid_argument, and std::runtime_error where the
  /// constraint cannot go back; nothing has changed then.
  std::int64_t truncate(std::int32_t slot, std::int64_t num_tokens);

  /// The first `num_computed` tokens are in the slot's pages: from now on others may find those that they fill.
  void share(std::int32_t slot, std::int64_t num_computed);

  /// How many tokens of the slot are in pages that others may find, and the last of these pages or kNone.
  std::pair<std::int64_t, std::int32_t> shared(std::int32_t slot);

  /// How many of the slot's pages no other sequence has.
  std::int32_t private_pages(std::int32_t slot);

  /// The pool as a picture of at most `max_cells` cells, where the pages of the `pinned` slots are pinned.
  PageMap page_map(std::span<const std::int32_t> pinned, std::int32_t max_cells);

  /// Gives back the slot's pages; its tokens stay. What it shares stays in the prefix cache until pages are needed.
  void release_pages(std::int32_t slot);

  /// Gives back everything. The slot's number may be handed out again.
  void close(std::int32_t slot);

  /// Throws std::out_of_range when no sequence is open in the slot.
  Sequence& at(std::int32_t slot);

  const PagePool& pages() const { return pages_; }
  RadixTree& tree() { return tree_; }
  std::int32_t free_pages() const { return pages_.free_pages(); }
  std::int32_t cached_pages() const { return tree_.cached_pages(); }                ///< kept for who comes
  std::int32_t held_pages() const { return pages_.held_pages() - cached_pages(); }  ///< of open sequences
  std::int32_t page_size() const { return page_size_; }
  std::int32_t vocab_size() const { return vocab_size_; }

 private:
  void find(const Sequence& sequence);

  PagePool pages_;
  RadixTree tree_;
  std::int32_t page_size_;
  std::int32_t vocab_size_;
  std::vector<std::unique_ptr<Sequence>> slots_;
  std::vector<std::int32_t> free_;
  std::vector<std::int32_t> found_;  ///< scratch
};

}  // namespace quire
