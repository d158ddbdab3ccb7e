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
#include "kv_cache/prefix_outline.h"
#include "kv_cache/radix_tree.h"
#include "kv_cache/sequence_states.h"
#include "kv_cache/state_store.h"
#include "sampling/pooling.h"
#include "sampling/sampling_state.h"

namespace quire {

/// A sequence of tokens that the model extends: its tokens, its KV pages and how its next token is sampled.
struct Sequence {
  std::vector<std::int32_t> tokens;
  std::int64_t num_prompt_tokens;
  std::int64_t
      prompt_logprobs_done;         ///< prompt positions whose logprobs were reported; recomputing does not repeat them
  std::vector<std::int32_t> pages;  ///< page i holds positions [i * block_size, (i + 1) * block_size)
  std::int32_t root;                ///< root of its prefixes in the tree; kNone: it shares no pages
  std::int64_t shared;              ///< number of its first pages that are in the tree
  std::int64_t num_computed;        ///< number of its first tokens whose KV the pages hold
  SamplingState sampling;
  std::optional<Pooling> pooling;  ///< set if its hidden states are pooled, and no token is sampled
  std::shared_ptr<TokenConstraint> constraint;
  std::int64_t num_followed;  ///< tokens up to the last one that the constraint has advanced past
  std::int64_t segment;       ///< position at which its second segment begins; 0: it has only one
  std::optional<std::string> cache_salt;
  std::int64_t number;                     ///< number among all sequences ever opened: unique, unlike the slot
  std::unique_ptr<SequenceStates> states;  ///< nullptr if the model has no state
  std::int32_t adapter = 0;                ///< number of the adapter that computes its tokens; 0: none
};

/// The open sequences, and the KV pages that they and the prefix cache hold. A slot, a small number that is reused
/// after `close`, identifies a sequence.
///
/// free_pages() + cached_pages() + held_pages() == pages().total(), always. Not thread-safe: the step loop owns it.
///
/// All functions throw std::out_of_range for a slot without a sequence, and std::invalid_argument for counts and tokens
/// that do not fit it; nothing has changed then.
class Sequences {
 public:
  /// The pool commits `extent` pages at a time, all at once by default. The prefix cache begins with what the ledger
  /// takes over, and its snapshots with what `state_ledger` does. Throws std::invalid_argument unless both numbers of
  /// pages are at least 1.
  ///
  /// With `state` each sequence that has pages has a record of state, and the prefix cache snapshots. What `match` and
  /// `start` find then ends at a snapshot; `start`, `fork` and `reserve` also fail when sequences hold all records.
  Sequences(std::int32_t num_pages, std::int32_t block_size, std::int32_t vocab_size,
            std::int32_t extent = PagePool::kAll, PageLedger* ledger = nullptr, const StateShape& state = {},
            StateLedger* state_ledger = nullptr, const StateMemory& state_memory = {});
  ~Sequences();
  Sequences(const Sequences&) = delete;
  Sequences& operator=(const Sequences&) = delete;

  /// Returns the slot of a new sequence, without pages. It shares full pages with the sequences of the same
  /// `cache_salt`, and with none without a salt. `segment`: the position at which the second segment of a pair begins,
  /// 0 for a sequence of one. Throws std::invalid_argument for invalid tokens or configurations.
  std::int32_t open(std::vector<std::int32_t> tokens, std::int64_t num_prompt_tokens, SamplingConfig sampling,
                    const std::optional<std::string>& cache_salt,
                    const std::optional<PoolingConfig>& pooling = std::nullopt,
                    std::shared_ptr<TokenConstraint> constraint = nullptr, std::int64_t segment = 0);

  /// The tokens of a slot that the prefix cache holds now. At least one token is always left to compute, and every
  /// prompt token whose logprobs are still to be reported, or whose hidden state is still to be pooled.
  struct Match {
    std::int64_t tokens = 0;
    std::int32_t cached_pages = 0;        ///< pages of the match that no sequence holds
    std::int32_t end = RadixTree::kNone;  ///< last page of the match
  };
  Match match(std::int32_t slot);

  /// Gives a slot without pages those of its prefix match, and more to cover `num_tokens` positions. Returns the number
  /// of cached tokens; or nullopt, and changes nothing, when the pool lacks pages.
  std::optional<std::int64_t> start(std::int32_t slot, std::int64_t num_tokens);

  /// Gives a slot that has no pages but those of its earlier prefix matches those of the present one, so that they are
  /// kept, as is the snapshot at their end. Returns the number of their tokens. Does not count as a use of the prefix.
  std::int64_t hold_match(std::int32_t slot);

  /// Gives a slot without pages the first `num_computed` positions of `source`, where both have the same tokens and
  /// `source` has computed them, and more to cover `num_tokens` positions. Full pages are shared; the page in which the
  /// two diverge is a new one, whose contents the caller copies. Returns false, and changes nothing, when the pool
  /// lacks pages. Throws std::invalid_argument when the tokens or the salts differ. The state of `source` is copied if
  /// it is that after `num_computed` tokens; else the slot begins at an earlier snapshot: see `resume`.
  bool fork(std::int32_t slot, std::int32_t source, std::int64_t num_computed, std::int64_t num_tokens);

  /// Opens a sequence with the first `num_tokens` tokens of `source` and others after them, sampled by the same
  /// parameters. It has neither pages nor a constraint. Throws std::invalid_argument for invalid tokens.
  std::int32_t open_branch(std::int32_t source, std::int64_t num_tokens, std::span<const std::int32_t> others);

  /// Gives a slot the tokens, pages and sampling state of its branch, which gets those of the slot.
  void adopt(std::int32_t slot, std::int32_t branch);

  /// Lets an adapter compute a sequence that has no pages yet, or none (0). Its salt must be the adapter's own: pages
  /// hold what one adapter has computed. Throws std::logic_error if the sequence has pages.
  void set_adapter(std::int32_t slot, std::int32_t adapter);

  /// Makes the slot's pages cover `num_tokens` positions. Returns false, and changes nothing, when the pool lacks
  /// pages.
  bool reserve(std::int32_t slot, std::int64_t num_tokens);

  /// Returns the number of positions that the slot's pages cover.
  std::int64_t num_reserved_tokens(std::int32_t slot) const { return std::ssize(at(slot).pages) * block_size_; }

  /// Returns the number of pages that these slots lack to cover so many positions each.
  std::int64_t pages_lacked(std::span<const std::int32_t> slots, std::span<const std::int64_t> num_tokens) const;

  /// Returns the number of the slot's first tokens that are computed.
  std::int64_t num_computed_tokens(std::int32_t slot) const { return at(slot).num_computed; }

  /// Returns the indices of the slots in prefill: not all of the prompt, or of the tokens but the last, is computed.
  std::vector<std::int32_t> prefilling(std::span<const std::int32_t> slots) const;

  /// Returns the indices of the slots whose pages do not cover their tokens.
  std::vector<std::int32_t> growing(std::span<const std::int32_t> slots) const;

  /// Keeps the first `num_tokens` tokens, of which the prompt is a part; sampling state and constraint go back with
  /// them. Gives back the pages that hold none of them, and the page that is written next if another sequence or the
  /// prefix cache has it too: a shared page is never written. That is the page of the last token, which is computed
  /// again to sample the one after it, or without `recompute_last` the page of the token that the caller appends next.
  /// Returns the number of positions whose pages are left, with state what `resume` does for the tokens that stay
  /// computed. Throws std::invalid_argument, and std::runtime_error where the constraint cannot go back; neither tokens
  /// nor pages have changed then.
  std::int64_t truncate(std::int32_t slot, std::int64_t num_tokens, bool recompute_last = true);

  /// Adds an output token, or a draft of one.
  void append(std::int32_t slot, std::int32_t token);

  /// Notes that the first `num_computed` tokens are computed, and puts the pages that they fill into the prefix cache.
  /// `contents`: checksums of their tiles, where these are known, from the first page on that is not in it yet. Ends a
  /// step of `write_states`.
  void share(std::int32_t slot, std::int64_t num_computed, std::span<const std::uint64_t> contents = {});

  /// Begins a step with the states of its tokens: see SequenceStates::write. `share` ends it, or `resume` where it has
  /// failed. Throws std::logic_error if the model has no state.
  StatePath write_states(std::int32_t slot, std::int64_t start, std::int64_t end, std::int64_t certain);

  /// Returns from which token on the slot is to be computed after a fork or a step, where the first `num_computed` have
  /// been: that, or fewer if there is no state after it. The state then goes back to the latest snapshot, or to the
  /// beginning, and the pages after that are given back.
  std::int64_t resume(std::int32_t slot, std::int64_t num_computed);

  /// Returns the keys of the slot's prefixes that `match` may find: of the empty one, and of those that full pages end.
  /// Empty for a sequence that shares no pages.
  std::vector<PrefixKey> keys(std::int32_t slot);

  /// Returns the keys of the first `most` pieces of the state after a prefix; none for a model without state.
  std::vector<PrefixKey> state_keys(const PrefixKey& prefix, std::int32_t most) const;

  /// Returns the numbers, after those of the pages, of the pieces of the slot's state; none if it has none.
  std::vector<std::int32_t> state_pages(std::int32_t slot) const;

  /// Puts pages that have been filled, and the state after them in the slot's record, into the prefix cache: the first
  /// `num_tokens` tokens. `contents` as for `share`. The slot is only to be closed then.
  void share_filled(std::int32_t slot, std::int64_t num_tokens, std::span<const std::uint64_t> contents);

  /// Returns the number of the slot's tokens in pages of the prefix cache, and the last of these pages or kNone.
  std::pair<std::int64_t, std::int32_t> shared(std::int32_t slot);

  /// Returns the number of the slot's pages that no other sequence has.
  std::int32_t private_pages(std::int32_t slot);

  /// Returns a map of the pool of at most `max_cells` cells, where the pages of the `pinned` slots are pinned.
  PageMap page_map(std::span<const std::int32_t> pinned, std::int32_t max_cells);

  /// Returns a part of the prefix cache as a tree, where the pages of the `pinned` slots are pinned.
  std::vector<PrefixRun> outline(std::span<const std::int32_t> pinned, const OutlineLimits& limits);

  /// Gives back the slot's pages; its tokens stay. Shared pages stay in the prefix cache until pages are needed.
  void release_pages(std::int32_t slot);

  /// Ends the sequence and gives back its pages. The slot may be reused.
  void close(std::int32_t slot);

  /// Throws std::out_of_range when no sequence is open in the slot.
  const Sequence& at(std::int32_t slot) const;
  Sequence& at(std::int32_t slot) { return const_cast<Sequence&>(std::as_const(*this).at(slot)); }

  const PagePool& pages() const { return pages_; }
  RadixTree& tree() { return tree_; }
  StateStore* states() const { return states_.get(); }  ///< nullptr if the model has no state
  std::int32_t free_pages() const { return pages_.free_pages(); }
  std::int32_t cached_pages() const { return tree_.cached_pages(); }                ///< pages that only the cache holds
  std::int32_t held_pages() const { return pages_.held_pages() - cached_pages(); }  ///< pages that open sequences hold
  std::int32_t block_size() const { return block_size_; }
  std::int32_t vocab_size() const { return vocab_size_; }

 private:
  std::vector<std::uint8_t> page_states(std::span<const std::int32_t> pinned);
  std::span<const std::int32_t> findable(const Sequence& sequence) const;
  std::int64_t find(const Sequence& sequence);
  std::int64_t begin_at_snapshot(Sequence& sequence, std::span<const std::int32_t> pages);

  PagePool pages_;
  std::unique_ptr<StateStore> states_;
  RadixTree tree_;
  std::int32_t block_size_;
  std::int32_t vocab_size_;
  std::vector<std::unique_ptr<Sequence>> slots_;
  std::vector<std::int32_t> free_;
  std::int64_t num_opened_ = 0;
  std::vector<std::int32_t> found_;  ///< pages of the latest prefix match, kept to reuse the memory
};

}  // namespace quire
