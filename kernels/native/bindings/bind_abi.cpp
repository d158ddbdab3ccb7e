#include <nanobind/stl/map.h>
#include <nanobind/stl/string.h>

#include <cstddef>
#include <map>
#include <string>
#include <type_traits>

#include "bindings/bindings.h"
#include "compute/abi.h"
#include "compute/arena.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace quire {
namespace {

/// Bytes of a row of each input whose rows do not depend on the model.
std::map<std::string, std::size_t> step_input_bytes() {
  std::map<std::string, std::size_t> bytes;
  StepInputs{}.for_each([&](const char* name, const auto* array) {
    if constexpr (!std::is_same_v<decltype(array), const float*>) bytes[name] = sizeof *array;
  });
  return bytes;
}

}  // namespace

void bind_abi(nb::module_& m) {
  m.attr("CACHE_LINE") = kCacheLine;
  m.attr("HUGE_PAGE") = kHugePage;
  m.attr("PACKED_BLOCK") = kPackedBlock;
  m.attr("TILE_ROWS") = kTileRows;
  m.attr("TILE_PAIRS") = kTilePairs;
  m.attr("KV_TILE_TOKENS") = kTileTokens;
  m.attr("BLOCK_TOKENS") = kBlockTokens;
  m.attr("MAX_KV_SPLITS") = kMaxKvSplits;
  m.attr("STATE_WRITES") = kStateWrites;
  nb::enum_<Dim> dims(m, "Dim", nb::is_arithmetic(), "Index of each size of a step in the dims that kernels read.");
  for (std::size_t i = 0; i < kNumDims; i++) dims.value(kDimNames[i].data(), static_cast<Dim>(i));
  nb::class_<AttentionEntry> entry(m, "AttentionEntry", "Offsets of the fields of an attention entry, in bytes.");
  entry.attr("ROW") = offsetof(AttentionEntry, row);
  entry.attr("TOKENS") = offsetof(AttentionEntry, tokens);
  entry.attr("POSITION") = offsetof(AttentionEntry, position);
  entry.attr("PAGES") = offsetof(AttentionEntry, pages);
  entry.attr("CONTEXT") = offsetof(AttentionEntry, context);
  entry.attr("BYTES") = sizeof(AttentionEntry);
  nb::class_<KvSplit> split(m, "KvSplit", "Offsets of the fields of a KV split, in bytes.");
  split.attr("ROW") = offsetof(KvSplit, row);
  split.attr("POSITION") = offsetof(KvSplit, position);
  split.attr("PAGES") = offsetof(KvSplit, pages);
  split.attr("BLOCK") = offsetof(KvSplit, block);
  split.attr("BYTES") = sizeof(KvSplit);
  nb::class_<SplitReduction> reduction(m, "SplitReduction", "Offsets of the fields of a split reduction, in bytes.");
  reduction.attr("ROW") = offsetof(SplitReduction, row);
  reduction.attr("POSITION") = offsetof(SplitReduction, position);
  reduction.attr("FIRST") = offsetof(SplitReduction, first);
  reduction.attr("SPLITS") = offsetof(SplitReduction, splits);
  reduction.attr("BYTES") = sizeof(SplitReduction);
  nb::class_<StateEntry> state_entry(m, "StateEntry", "Offsets of the fields of a state entry, in bytes.");
  state_entry.attr("ROW") = offsetof(StateEntry, row);
  state_entry.attr("RECORD") = offsetof(StateEntry, record);
  state_entry.attr("FIRST") = offsetof(StateEntry, first);
  state_entry.attr("WRITES") = offsetof(StateEntry, writes);
  state_entry.attr("BYTES") = sizeof(StateEntry);
  nb::class_<StateWrite> state_write(m, "StateWrite", "Offsets of the fields of a write of state, in bytes.");
  state_write.attr("END") = offsetof(StateWrite, end);
  state_write.attr("RECORD") = offsetof(StateWrite, record);
  state_write.attr("BYTES") = sizeof(StateWrite);
  nb::class_<SampleRow> sample(m, "SampleRow", "Offsets of the fields of what is to be sampled, and its kinds.");
  sample.attr("RANDOMS") = offsetof(SampleRow, randoms);
  sample.attr("TOP_P") = offsetof(SampleRow, top_p);
  sample.attr("INVERSE_TEMPERATURE") = offsetof(SampleRow, inverse_temperature);
  sample.attr("REACH") = offsetof(SampleRow, reach);
  sample.attr("TOP_K") = offsetof(SampleRow, top_k);
  sample.attr("KIND") = offsetof(SampleRow, kind);
  sample.attr("ROW") = offsetof(SampleRow, row);
  sample.attr("TOKEN") = offsetof(SampleRow, token);
  sample.attr("TOP") = offsetof(SampleRow, top);
  sample.attr("TRIES") = offsetof(SampleRow, tries);
  sample.attr("MASK") = offsetof(SampleRow, mask);
  sample.attr("LIMIT") = offsetof(SampleRow, limit);
  sample.attr("EDITED") = offsetof(SampleRow, edited);
  sample.attr("FIRST_EDIT") = offsetof(SampleRow, first_edit);
  sample.attr("BANNED") = offsetof(SampleRow, banned);
  sample.attr("BIASED") = offsetof(SampleRow, biased);
  sample.attr("PROMPTED") = offsetof(SampleRow, prompted);
  sample.attr("GENERATED") = offsetof(SampleRow, generated);
  sample.attr("REPETITION_PENALTY") = offsetof(SampleRow, repetition_penalty);
  sample.attr("PRESENCE_PENALTY") = offsetof(SampleRow, presence_penalty);
  sample.attr("BYTES") = sizeof(SampleRow);
  sample.attr("NOTHING") = static_cast<int>(SampleRow::kNothing);
  sample.attr("LIKELIEST") = static_cast<int>(SampleRow::kLikeliest);
  sample.attr("SAMPLE") = static_cast<int>(SampleRow::kSample);
  sample.attr("REPORT") = static_cast<int>(SampleRow::kReport);
  sample.attr("MOST_TOP") = kMostTop;
  sample.attr("MOST_TRIES") = kMostTries;
  m.attr("LEAST_SHARE_BITS") = kLeastShareBits;
  m.attr("MASK_BITS") = kMaskBits;
  m.def("edit_limit", &edit_limit, "vocab_size"_a,
        "Return how many edits there may be of all rows whose logits are computed at once.");
  nb::class_<LikelyToken> likely(m, "LikelyToken", "Offsets of the fields of a likely token, in bytes.");
  likely.attr("TOKEN") = offsetof(LikelyToken, token);
  likely.attr("KEY") = offsetof(LikelyToken, key);
  likely.attr("BYTES") = sizeof(LikelyToken);
  m.attr("ROW_MASKS") = kRowMasks;
  nb::class_<LogitEdit> edit(m, "LogitEdit", "Offsets of the fields of a change of a token's logit, in bytes.");
  edit.attr("TOKEN") = offsetof(LogitEdit, token);
  edit.attr("AMOUNT") = offsetof(LogitEdit, amount);
  edit.attr("BYTES") = sizeof(LogitEdit);
  nb::class_<SampledRow> sampled(m, "SampledRow", "Offsets of the fields of what was sampled, in bytes.");
  sampled.attr("MASS") = offsetof(SampledRow, mass);
  sampled.attr("IS_GOOD") = offsetof(SampledRow, is_good);
  sampled.attr("TOKEN") = offsetof(SampledRow, token);
  sampled.attr("MOST") = offsetof(SampledRow, most);
  sampled.attr("KEY") = offsetof(SampledRow, key);
  sampled.attr("RANK") = offsetof(SampledRow, rank);
  sampled.attr("NUM_TRIED") = offsetof(SampledRow, num_tried);
  sampled.attr("TRIED") = offsetof(SampledRow, tried);
  sampled.attr("TOP_TOKENS") = offsetof(SampledRow, top_tokens);
  sampled.attr("TOP_KEYS") = offsetof(SampledRow, top_keys);
  sampled.attr("BYTES") = sizeof(SampledRow);
  m.def("step_input_bytes", &step_input_bytes,
        "Return the bytes of a row of each step input, except of logits and hidden states.");
}

}  // namespace quire
