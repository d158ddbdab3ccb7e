#include "compute/step_gather.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace quire {

StepGather::StepGather(const RunnerConfig& config, const StepInputs& inputs, Device& device)
    : config_(config),
      inputs_(inputs),
      device_(device),
      kv_heads_(std::ranges::min(config.kv_layers, {}, &KvLayerShape::heads).heads) {}

void StepGather::begin(KvCache& kv_cache) {
  device_.begin_step();
  kv_cache_ = &kv_cache;
  dims_ = {};
  dim(dims_, Dim::max_num_batched_tokens) = config_.max_num_batched_tokens;
  dim(dims_, Dim::kv_tiles) = kv_cache.memory.tiles();
  tasks_.clear();
  state_rows_.clear();
  first_rows_.clear();
  pieces_.clear();
}

void StepGather::add(std::int32_t index, std::int32_t slot, std::int64_t start, std::int64_t count,
                     std::int64_t num_drafts) {
  Sequence& sequence = kv_cache_->sequences.at(slot);
  const std::int64_t first = dim(dims_, Dim::tokens), end = start + count;
  first_rows_.push_back(static_cast<std::int32_t>(first));
  const auto length = static_cast<std::int64_t>(sequence.tokens.size());
  for (std::int64_t i = 0; i < count; i++) {
    const std::int64_t position = start + i;
    inputs_.token_ids[first + i] = sequence.tokens[position];
    inputs_.positions[first + i] = static_cast<std::int32_t>(position);
    inputs_.token_types[first + i] = sequence.segment > 0 && position >= sequence.segment ? 1 : 0;
    inputs_.row_adapters[first + i] = sequence.adapter;
    inputs_.kv_slots[first + i] = std::int64_t{sequence.pages[position / config_.block_size]} * config_.block_size +
                                  position % config_.block_size;
  }
  kv_cache_->clear_values(sequence, start, end);
  const PageList pages = device_.page_list(sequence.pages);
  for (std::int64_t i = 0; i < count; i += config_.tokens_per_entry) {
    const std::int64_t tokens = std::min(config_.tokens_per_entry, count - i);
    const std::int64_t context = config_.bidirectional ? length : start + i + tokens;
    inputs_.entries[dim(dims_, Dim::entries)++] = {first + i, tokens, start + i, pages, context};
  }
  if (sequence.sampling.config().prompt_logprobs)
    for (std::int64_t next = std::max(start + 1, sequence.prompt_logprobs_done);
         next <= end && next < sequence.num_prompt_tokens; next++)
      tasks_.push_back({index, slot, &sequence, static_cast<std::int32_t>(first + next - 1 - start), 1, next, false});
  if (sequence.pooling) {
    for (std::int64_t next = std::max(start, sequence.pooling->next()); next < std::min(end, sequence.pooling->end());
         next++)
      state_rows_.push_back({index, static_cast<std::int32_t>(first + next - start)});
  } else if (end == length) {
    const std::int64_t position = length - num_drafts;
    for (std::int64_t i = length; i-- > position;) sequence.sampling.remove(sequence.tokens[i]);
    tasks_.push_back({index, slot, &sequence, static_cast<std::int32_t>(first + position - 1 - start),
                      static_cast<std::int32_t>(num_drafts + 1), position, true, sequence.constraint.get()});
  }
  const std::int64_t certain = length - num_drafts - (sequence.constraint ? 1 : 0);  // a late one takes the last back
  pieces_.push_back({slot, first, start, count, std::clamp(certain, start, end)});
  dim(dims_, Dim::tokens) += count;
}

void StepGather::write_states() {
  Sequences& sequences = kv_cache_->sequences;
  const StateStore* store = sequences.states();
  if (store == nullptr) return;
  std::int64_t& num_writes = dim(dims_, Dim::state_writes);
  for (const auto& [slot, row, start, count, certain] : pieces_) {
    const StatePath path = sequences.write_states(slot, start, start + count, certain);
    const std::int64_t first = num_writes;
    for (const auto& [length, record] : path.writes)
      inputs_.state_writes[num_writes++] = {row + length - start, store->shape().offset(record)};
    if (path.writes.empty() || path.writes.back().length < start + count)
      inputs_.state_writes[num_writes++] = {row + count, store->shape().offset(StateStore::kNone)};
    inputs_.state_entries[dim(dims_, Dim::state_entries)++] = {row, store->shape().offset(path.from), first,
                                                               num_writes - first};
  }
}

void StepGather::take_back_state(std::int32_t index) {
  Sequences& sequences = kv_cache_->sequences;
  const Piece& piece = pieces_[static_cast<std::size_t>(index)];
  if (sequences.states() != nullptr && sequences.at(piece.slot).states->is_writing())
    sequences.resume(piece.slot, piece.start);
}

void StepGather::take_back_states() {
  for (std::size_t i = 0; i < pieces_.size(); i++) take_back_state(static_cast<std::int32_t>(i));
}

std::int32_t StepGather::make_lookahead() {
  const auto row = static_cast<std::int32_t>(dim(dims_, Dim::tokens) - 1);
  inputs_.token_ids[row] = config_.vocab_size;
  tasks_.pop_back();
  return row;
}

/// Where a step has few query tokens, the KV of those with a long context is split to keep the device busy. The
/// bits do not depend on it: see emit/attention.py.
void StepGather::split_attention(Dims& dims) const {
  std::int64_t& entries = dim(dims, Dim::entries);
  std::int64_t &kv_splits = dim(dims, Dim::kv_splits), &reductions = dim(dims, Dim::reductions);
  if (entries < 0 || entries > config_.max_num_batched_tokens || reductions < 0 || kv_splits < 0 ||
      reductions > kv_splits || kv_splits > kMaxKvSplits)
    throw std::invalid_argument("entries=" + std::to_string(entries) + ", kv_splits=" + std::to_string(kv_splits) +
                                ", reductions=" + std::to_string(reductions) + " exceed the step inputs");
  if (config_.bidirectional || entries * kv_heads_ >= device_.busy_items()) return;
  std::int64_t kept = 0;
  for (std::int64_t i = 0; i < entries; i++) {
    const AttentionEntry entry = inputs_.entries[i];
    const std::int64_t unseen = config_.window > 0 ? std::max<std::int64_t>(0, entry.position + 1 - config_.window) : 0;
    const std::int64_t first = unseen / kBlockTokens, blocks = entry.position / kBlockTokens + 1 - first;
    if (entry.tokens > 1 || blocks == 1 || kv_splits + blocks > kMaxKvSplits) {
      inputs_.entries[kept++] = entry;
      continue;
    }
    inputs_.reductions[reductions++] = {entry.row, entry.position, kv_splits, blocks};
    for (std::int64_t block = first; block < first + blocks; block++)
      inputs_.kv_splits[kv_splits++] = {entry.row, entry.position, entry.pages, block};
  }
  entries = kept;
}

}  // namespace quire
