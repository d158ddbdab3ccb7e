#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace quire {

// The contract with emitted kernels (kernels/emit/). What both sides must agree on is stated here and nowhere else:
// bind_abi.cpp exports it, and the emitters import it.

inline constexpr std::int64_t kCacheLine = 64;      ///< bytes of a cache line
inline constexpr std::int64_t kPackedBlock = 32;    ///< columns of a block of packed weights, and its k
inline constexpr std::int64_t kTileRows = 16;       ///< rows of a tile of packed activations, columns of one of weights
inline constexpr std::int64_t kTilePairs = 16;      ///< pairs of k in a tile
inline constexpr std::int64_t kTileTokens = 32;     ///< tokens of a KV tile
inline constexpr std::int64_t kBlockTokens = 256;   ///< tokens of a block of attention, and so of a KV split
inline constexpr std::int64_t kMaxKvSplits = 1024;  ///< most KV splits of a step
inline constexpr std::int64_t kStateWrites = 4;     ///< most writes of state for each token of an entry

/// Rounds up to whole cache lines.
constexpr std::size_t in_lines(std::size_t bytes) { return (bytes + kCacheLine - 1) / kCacheLine * kCacheLine; }

static_assert(kPackedBlock == 2 * kTileRows && kPackedBlock == 2 * kTilePairs);
static_assert(kTileTokens == kPackedBlock && kBlockTokens % kTileTokens == 0);

/// The sizes of a step, in the order in which kernels read them. `kept_tokens` are those whose hidden states are kept
/// for a draft head: all of the step's, or none.
enum class Dim {
  tokens,
  logit_rows,
  max_num_batched_tokens,
  kv_tiles,
  entries,
  kv_splits,
  reductions,
  kept_tokens,
  state_entries,
  state_writes,
  count
};

inline constexpr std::size_t kNumDims = static_cast<std::size_t>(Dim::count);
inline constexpr std::array<std::string_view, kNumDims> kDimNames = {
    "tokens",     "logit_rows",  "max_num_batched_tokens", "kv_tiles",    "entries", "kv_splits",
    "reductions", "kept_tokens", "state_entries",          "state_writes"};
static_assert(!kDimNames.back().empty());

using Dims = std::array<std::int64_t, kNumDims>;

/// Computes work items [begin, end) of a launch.
using Kernel = void (*)(void* const* buffers, const std::int64_t* dims, std::int64_t begin, std::int64_t end);

/// The value by which kernels find the pages of a sequence, i32 numbers: see Device::page_list.
using PageList = std::uintptr_t;

/// Query tokens of one sequence that an attention work item handles together.
struct AttentionEntry {
  std::int64_t row;       ///< row of the first token, among the tokens of the step
  std::int64_t tokens;    ///< number of query tokens
  std::int64_t position;  ///< position of the first token in its sequence
  PageList pages;         ///< pages of the sequence
  std::int64_t context;   ///< tokens of the sequence up to the entry's last one; for an encoder, all of them
};

/// One query token and one block of the KV that it attends to (flash-decoding).
struct KvSplit {
  std::int64_t row, position;
  PageList pages;
  std::int64_t block;  ///< index of the block of kBlockTokens tokens in the sequence
};

/// The KV splits of one query token, whose results are combined in order.
struct SplitReduction {
  std::int64_t row, position;
  std::int64_t first;   ///< index of the first split
  std::int64_t splits;  ///< number of splits
};

/// Tokens of one sequence, whose layers' state they rewrite in order (StateStore). Records are given by their distance
/// from the first one, in bytes.
struct StateEntry {
  std::int64_t row;     ///< row of the first token, among the tokens of the step
  std::int64_t record;  ///< record that is read before the first token; negative: all zeros
  std::int64_t first;   ///< index of the first of its writes
  std::int64_t writes;  ///< number of writes; the last one comes after the last token
};

/// A record that is written after tokens of an entry.
struct StateWrite {
  std::int64_t end;     ///< row after the last token before it
  std::int64_t record;  ///< negative: none
};

inline constexpr std::int32_t kMostTries = 16;       ///< most tokens that are sampled before a constraint's mask counts
inline constexpr std::int32_t kLeastShareBits = 16;  ///< trying ends at 2^-16 of the mass: less is too coarse
inline constexpr std::int32_t kRowMasks = 2;         ///< most masks of a row
inline constexpr std::int64_t kMaskBits = 32;        ///< tokens of a word of a mask

/// Returns how many edits there may be of all rows whose logits are computed at once: no fewer than a single row may
/// have, which may penalize each token of the vocabulary, and besides ban and bias what a request may.
constexpr std::int32_t edit_limit(std::int32_t vocab_size) { return std::max(1 << 19, vocab_size + (1 << 15)); }

/// A token whose logit is changed before a row samples, and how: its bias, or what its outputs take off.
struct LogitEdit {
  std::int32_t token;
  float amount;
};

/// What a device samples of a row of logits; numbers as in SamplingConfig. Its edits follow one another from number
/// `first_edit` on, of four kinds: tokens that are banned, those with a bias, those that were only in the prompt, and
/// those that are outputs.
struct alignas(kCacheLine) SampleRow {
  enum Kind : std::int32_t {
    kNothing,
    kLikeliest,
    kSample,
    kReport,  ///< only log probabilities, of `token`
  };

  double randoms[kMostTries];  ///< in [0, 1), one for each try, or for the sample
  double top_p;                ///< 1: no bound
  float inverse_temperature;
  float reach;         ///< how far below the largest logit tokens may be, in temperatures, negative
  std::int32_t top_k;  ///< 0: no bound
  std::int32_t kind;
  std::int32_t row;  ///< among the rows of logits
  std::int32_t token;
  std::int32_t top;     ///< number of likeliest tokens of which log probabilities are wanted, or -1 if none at all are
  std::int32_t tries;   ///< tokens that are sampled, each from what those before have left; 0: one token
  std::int32_t mask;    ///< mask of a constraint, from 1; 0: none. It alone counts if edits ban all that it allows
  std::int32_t limit;   ///< mask of the tokens that may be sampled at all, likewise
  std::int32_t edited;  ///< 0: neither edits nor a limit
  std::int32_t first_edit, banned, biased, prompted, generated;
  float repetition_penalty, presence_penalty;
};

/// Most likeliest tokens of a SampledRow. If more are wanted, as wide beam searches do, they are listed in its row of
/// `changed_logits`, ordered by number.
inline constexpr std::int32_t kMostTop = 256;

struct LikelyToken {
  std::int32_t token, key;
};

/// What a device has sampled: a token, and what log probabilities are made of. Keys are those of logit_math.h.
struct SampledRow {
  std::uint64_t mass;                                     ///< of all tokens at temperature 1
  std::int32_t is_good;                                   ///< 0 if a logit is NaN or infinite, or if none is above -inf
  std::int32_t token;                                     ///< the first bad one, if it is not good; -1 if all are -inf
  std::int32_t most, key;                                 ///< keys of the largest logit and of the token's
  std::int32_t rank;                                      ///< from 1
  std::int32_t num_tried, tried[kMostTries];              ///< the tokens that were tried, of which `token` is the first
  std::int32_t top_tokens[kMostTop], top_keys[kMostTop];  ///< by rank
};

// Benchmarks write entries as rows of five i64, KV splits and reductions as rows of four.
static_assert(offsetof(AttentionEntry, tokens) == 8 && offsetof(AttentionEntry, position) == 16 &&
              offsetof(AttentionEntry, pages) == 24 && offsetof(AttentionEntry, context) == 32 &&
              sizeof(AttentionEntry) == 40);
static_assert(offsetof(KvSplit, position) == 8 && offsetof(KvSplit, pages) == 16 && offsetof(KvSplit, block) == 24 &&
              sizeof(KvSplit) == 32);
static_assert(offsetof(SplitReduction, position) == 8 && offsetof(SplitReduction, first) == 16 &&
              offsetof(SplitReduction, splits) == 24 && sizeof(SplitReduction) == 32);
static_assert(offsetof(StateEntry, record) == 8 && offsetof(StateEntry, first) == 16 &&
              offsetof(StateEntry, writes) == 24 && sizeof(StateEntry) == 32);
static_assert(offsetof(StateWrite, record) == 8 && sizeof(StateWrite) == 16);

/// The inputs of a step, which kernels read and the runner writes. The arrays stay where they are for the runner's
/// life.
struct StepInputs {
  std::int32_t* token_ids;     ///< [max_num_batched_tokens]
  std::int32_t* positions;     ///< [max_num_batched_tokens]
  std::int32_t* token_types;   ///< [max_num_batched_tokens]: 0, or 1 in the second segment of a sequence
  std::int32_t* row_adapters;  ///< [max_num_batched_tokens]: number of the row's adapter, 0: none
  std::int64_t* kv_slots;      ///< [max_num_batched_tokens]: page * block_size + offset in the page
  AttentionEntry* entries;     ///< [max_num_batched_tokens]
  KvSplit* kv_splits;          ///< [kMaxKvSplits]
  SplitReduction* reductions;  ///< [kMaxKvSplits]
  StateEntry* state_entries;   ///< [max_num_batched_tokens]; of a model with state
  StateWrite* state_writes;    ///< [kStateWrites * max_num_batched_tokens]
  std::int32_t* logit_rows;    ///< [max_logit_rows]: rows of the step whose logits or hidden states are wanted
  SampleRow* sample_rows;      ///< [max_logit_rows + 1]; of a device that samples; the last one is sampled once more
  SampledRow* sampled_rows;    ///< [max_logit_rows + 1], likewise
  LogitEdit* logit_edits;      ///< [edit_limit(vocab_size)]; of a device that samples, as what follows
  std::uint32_t*
      token_masks;        ///< [kRowMasks * max_logit_rows][logit_stride / kMaskBits]: a bit for each token, 1: allowed
  float* logits;          ///< [max_logit_rows][logit_stride]
  float* changed_logits;  ///< likewise; of a device that samples
  float* hidden_states;   ///< [max_logit_rows][hidden_size]

  /// Calls visit(name, array) for each array, by the name under which emitted kernels ask for it.
  template <class Visit>
  void for_each(Visit visit) const {
    visit("token_ids", token_ids);
    visit("positions", positions);
    visit("token_types", token_types);
    visit("row_adapters", row_adapters);
    visit("kv_slots", kv_slots);
    visit("entries", entries);
    visit("kv_splits", kv_splits);
    visit("reductions", reductions);
    visit("state_entries", state_entries);
    visit("state_writes", state_writes);
    visit("logit_rows", logit_rows);
    visit("sample_rows", sample_rows);
    visit("sampled_rows", sampled_rows);
    visit("logit_edits", logit_edits);
    visit("token_masks", token_masks);
    visit("logits", logits);
    visit("changed_logits", changed_logits);
    visit("hidden_states", hidden_states);
  }
};

}  // namespace quire
