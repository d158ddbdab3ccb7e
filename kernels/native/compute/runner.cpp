#include "compute/runner.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <functional>
#include <numeric>
#include <stdexcept>
#include <utility>

#include "compute/arena.h"

namespace quire {
namespace {

constexpr std::int64_t kItemsPerThread = 2;  // of attention; with fewer, threads would wait for each other
constexpr int kPatience = 20;                // 1 / kPatience of a step is spent on waiting for a late constraint

std::int64_t next_step_number() {
  static std::atomic<std::int64_t> number{0};
  return ++number;
}

std::int64_t& dim(Dims& dims, Dim name) { return dims[static_cast<std::size_t>(name)]; }

const RunnerConfig& checked(const RunnerConfig& config) {
  constexpr std::int64_t kMost = std::int64_t{1} << 31, kMostBytes = std::int64_t{1} << 48;
  const auto require = [](const char* name, std::int64_t given, std::int64_t least, std::int64_t most) {
    if (given < least || given > most)
      throw std::invalid_argument(std::string(name) + "=" + std::to_string(given) + "; it must be from " +
                                  std::to_string(least) + " to " + std::to_string(most));
  };
  require("num_pages", config.num_pages, 1, kMost);
  require("block_size", config.block_size, kTileTokens, kMost);
  require("block_size modulo tokens of a tile", config.block_size % kTileTokens, 0, 0);
  require("vocab_size", config.vocab_size, 1, kMost);
  require("kv_heads", config.kv_heads, 1, kMost);
  require("max_num_batched_tokens", config.max_num_batched_tokens, 1, kMost);
  require("max_logit_rows", config.max_logit_rows, 1, kMost);
  if (config.logit_stride != 0) require("logit_stride", config.logit_stride, config.vocab_size, kMost);
  require("hidden_size", config.hidden_size, 0, kMost);
  require("tokens_per_entry", config.tokens_per_entry, 1, kMost);
  require("layers", config.layers, 1, kMost);
  require("tile_bytes", config.tile_bytes, 1, kMost);
  require("value_offset", config.value_offset, 0, config.tile_bytes);
  require("window", config.window, 0, kMost);
  const std::int64_t tiles = std::int64_t{config.num_pages} * (config.block_size / kTileTokens);
  require("bytes of KV of a layer's head", config.tile_bytes, 1, kMostBytes / tiles);
  require("layers times kv_heads", config.layers * config.kv_heads, 1, kMostBytes / (tiles * config.tile_bytes));
  return config;
}

}  // namespace

Runner::Runner(const RunnerConfig& config)
    : config_(checked(config)), threads_(config.threads, config.pin), sampler_(threads_) {
  const auto capacity = static_cast<std::size_t>(config.max_num_batched_tokens);
  const auto rows = static_cast<std::size_t>(config.max_logit_rows);
  auto array = [&]<class T>(T*& target, std::size_t count) {
    target = static_cast<T*>(arena_.allocate(count * sizeof(T)));
  };
  array(inputs_.token_ids, capacity);
  array(inputs_.positions, capacity);
  array(inputs_.token_types, capacity);
  array(inputs_.kv_slots, capacity);
  array(inputs_.entries, capacity);
  array(inputs_.kv_splits, kMaxKvSplits);
  array(inputs_.reductions, kMaxKvSplits);
  array(inputs_.logit_rows, rows);
  array(inputs_.logits, rows * static_cast<std::size_t>(config.logit_stride));
  array(inputs_.hidden_states, rows * static_cast<std::size_t>(config.hidden_size));
}

void Runner::open_kv() {
  const KvMemory::Shape shape{config_.layers, config_.kv_heads, config_.tile_bytes, config_.block_size,
                              config_.num_pages};
  kv_cache_.emplace(KvConfig{shape, config_.block_size, config_.vocab_size, config_.kv_memory_fd, config_.kv_model,
                             config_.log_sealed_pages},
                    arena_, threads_);
}

void* Runner::allocate_by_node(std::size_t bytes) {
  void* memory = arena_.allocate(bytes);
  if (threads_.nodes() > 1) touch_by_node(threads_, static_cast<std::byte*>(memory), bytes);
  return memory;
}

const KvCache& Runner::kv_cache() const {
  if (!kv_cache_) throw std::logic_error("there is no KV memory before open_kv");
  return *kv_cache_;
}

std::byte* Runner::kv_layer(std::int64_t layer) const {
  if (layer < 0 || layer >= config_.layers)
    throw std::out_of_range("layer " + std::to_string(layer) + " of " + std::to_string(config_.layers));
  return kv().layer(layer);
}

StepResult Runner::step(std::span<const std::int32_t> slots, std::span<const std::int64_t> starts,
                        std::span<const std::int64_t> counts, std::span<const std::int64_t> num_drafts,
                        std::span<const DraftBranch> branches) {
  const auto begun = TokenConstraint::Clock::now();
  if (sampler_.has_left()) throw std::logic_error("collect what is pending of the last step before the next one");
  check(slots, starts, counts, num_drafts);
  check_branches(slots, num_drafts, branches);
  check_size(slots, starts, counts, num_drafts, branches);
  kv_cache_->prefault();
  Dims dims{};
  dim(dims, Dim::max_num_batched_tokens) = config_.max_num_batched_tokens;
  dim(dims, Dim::kv_tiles) = kv().tiles();
  tasks_.clear();
  state_rows_.clear();
  num_taken_ = 0;
  computed_.clear();
  first_rows_.clear();
  for (std::size_t i = 0; i < slots.size(); i++)
    gather(static_cast<std::int32_t>(i), slots[i], starts[i], counts[i], num_drafts.empty() ? 0 : num_drafts[i], dims);
  StepResult result;
  result.number = step_number_ = next_step_number();
  try {
    gather_branches(slots, starts, num_drafts, branches, dims, result);
    result.token_ids.resize(slots.size() + branches_.size());
    result.logprobs.resize(slots.size() + branches_.size());
    if (keeps_features_) dim(dims, Dim::kept_tokens) = dim(dims, Dim::tokens);
    split_attention(dims);
    body_.run(threads_, dims);
    pool_states(slots, dims, result);
    sample(begun, dims, result);
  } catch (...) {
    cancel();
    close_branches();
    throw;
  }
  take_branches(slots, result);
  std::vector<bool> samples(slots.size() + branches.size());  // now or later, and shared then
  for (const SamplingTask& task : tasks_) samples[task.index] = samples[task.index] || task.samples;
  for (std::size_t i = 0; i < slots.size(); i++)
    if (!samples[i] && !result.errors.contains(static_cast<std::int32_t>(i)))
      computed_.emplace_back(slots[i], starts[i] + counts[i]);
  share_computed();
  return result;
}

std::map<std::int32_t, std::vector<std::int32_t>> Runner::collect(StepResult& result) {
  if (result.number != step_number_)
    throw std::invalid_argument("the result of step " + std::to_string(result.number) +
                                " is not that of the last step, number " + std::to_string(step_number_) +
                                "; collect each result before the next step");
  std::map<std::int32_t, std::vector<std::int32_t>> spans;
  try {
    while (sampler_.has_left() && (spans.empty() || sampler_.is_next_done())) {
      const std::int32_t index = take_next(tasks_.size(), result);
      std::erase(result.pending, index);
      spans[index] = result.token_ids[index];
    }
  } catch (...) {
    cancel();
    throw;
  }
  share_computed();
  return spans;
}

void Runner::encode(std::int64_t num_tokens) {
  if (num_tokens < 0 || num_tokens > config_.max_num_batched_tokens)
    throw std::invalid_argument("num_tokens=" + std::to_string(num_tokens) + "; it must be from 0 to " +
                                std::to_string(config_.max_num_batched_tokens));
  Dims dims{};
  dim(dims, Dim::max_num_batched_tokens) = config_.max_num_batched_tokens;
  dim(dims, Dim::tokens) = num_tokens;
  encoding_.run(threads_, dims);
}

bool Runner::fork(std::int32_t slot, std::int32_t source, std::int64_t num_computed, std::int64_t num_tokens) {
  if (!sequences().fork(slot, source, num_computed, num_tokens)) return false;
  const auto place = static_cast<std::size_t>(num_computed / config_.block_size);
  const std::int64_t tiles = (num_computed % config_.block_size + kTileTokens - 1) / kTileTokens;
  if (tiles == 0) return true;
  const std::int64_t page_tiles = kv().tiles_of_page();
  const std::int64_t from = sequences().at(source).pages[place] * page_tiles;
  const std::int64_t to = sequences().at(slot).pages[place] * page_tiles;
  for (std::int64_t layer = 0; layer < config_.layers; layer++)
    for (std::int64_t head = 0; head < config_.kv_heads; head++)
      std::memcpy(kv().tile(layer, head, to), kv().tile(layer, head, from),
                  static_cast<std::size_t>(tiles * config_.tile_bytes));
  return true;
}

void Runner::check(std::span<const std::int32_t> slots, std::span<const std::int64_t> starts,
                   std::span<const std::int64_t> counts, std::span<const std::int64_t> num_drafts) {
  std::vector<std::int32_t> sorted(slots.begin(), slots.end());
  std::ranges::sort(sorted);
  if (const auto twice = std::ranges::adjacent_find(sorted); twice != sorted.end())
    throw std::invalid_argument("slot " + std::to_string(*twice) + " is in the batch twice");
  if (slots.size() != starts.size() || slots.size() != counts.size() ||
      (!num_drafts.empty() && slots.size() != num_drafts.size()))
    throw std::invalid_argument("slots, starts, counts and num_drafts differ in length");
  for (std::size_t i = 0; i < slots.size(); i++) {
    const Sequence& sequence = sequences().at(slots[i]);
    const std::int64_t size = std::ssize(sequence.tokens);
    if (starts[i] < 0 || starts[i] > size || counts[i] < 1 || counts[i] > size - starts[i])
      throw std::invalid_argument("slot " + std::to_string(slots[i]) + ": " + std::to_string(counts[i]) +
                                  " tokens from " + std::to_string(starts[i]) + " on are not among its " +
                                  std::to_string(size));
    const std::int64_t end = starts[i] + counts[i];
    if (end > static_cast<std::int64_t>(sequence.pages.size()) * config_.block_size)
      throw std::invalid_argument("slot " + std::to_string(slots[i]) + ": its " +
                                  std::to_string(sequence.pages.size()) + " pages do not cover " + std::to_string(end) +
                                  " tokens; reserve them first");
    if (sequence.pooling && starts[i] > sequence.pooling->next())
      throw std::invalid_argument("slot " + std::to_string(slots[i]) + ": the hidden state of token " +
                                  std::to_string(sequence.pooling->next()) + " is to be pooled next, and token " +
                                  std::to_string(starts[i]) + " to be computed");
    if (config_.logit_stride == 0 && !sequence.pooling)
      throw std::invalid_argument("slot " + std::to_string(slots[i]) +
                                  " is to be sampled, but the model has no logits; only pool its hidden states");
    if (config_.bidirectional) check_whole(slots[i], starts[i], counts[i]);
    if (!num_drafts.empty() && num_drafts[i] != 0) check_drafts(slots[i], end, counts[i], num_drafts[i]);
  }
}

void Runner::check_branches(std::span<const std::int32_t> slots, std::span<const std::int64_t> num_drafts,
                            std::span<const DraftBranch> branches) {
  for (const DraftBranch& branch : branches) {
    const std::int64_t index = branch.index, length = std::ssize(branch.tokens);
    const bool has_drafts = index >= 0 && index < std::ssize(num_drafts) && num_drafts[index] > 0;
    const std::int64_t least = config_.contemplates ? 0 : 1;
    if (!has_drafts || sequences().at(slots[index]).constraint || length < least || length >= config_.max_logit_rows)
      throw std::invalid_argument(
          "a branch of " + std::to_string(length) + " tokens for sequence " + std::to_string(index) + " of " +
          std::to_string(slots.size()) + "; it must have drafts and no constraint, and the branch from " +
          std::to_string(least) + " to " + std::to_string(config_.max_logit_rows - 1) + " tokens");
    for (const std::int32_t token : branch.tokens)
      if (token < 0 || token >= config_.vocab_size)
        throw std::invalid_argument("token id " + std::to_string(token) + " of a branch is not in the vocabulary");
  }
}

void Runner::check_size(std::span<const std::int32_t> slots, std::span<const std::int64_t> starts,
                        std::span<const std::int64_t> counts, std::span<const std::int64_t> num_drafts,
                        std::span<const DraftBranch> branches) {
  std::int64_t total = std::accumulate(counts.begin(), counts.end(), std::int64_t{0});
  for (const DraftBranch& branch : branches) {
    const auto index = static_cast<std::size_t>(branch.index);
    const std::int64_t position = std::ssize(sequences().at(slots[index]).tokens) - num_drafts[index];
    total += position - starts[index] + std::max<std::int64_t>(std::ssize(branch.tokens), 1);
  }
  if (total > config_.max_num_batched_tokens)
    throw std::invalid_argument("a step of " + std::to_string(total) + " tokens exceeds max_num_batched_tokens=" +
                                std::to_string(config_.max_num_batched_tokens));
}

void Runner::check_whole(std::int32_t slot, std::int64_t start, std::int64_t count) {
  const Sequence& sequence = sequences().at(slot);
  if (start != 0 || count != std::ssize(sequence.tokens) || sequence.root != RadixTree::kNone)
    throw std::invalid_argument("slot " + std::to_string(slot) + ": " + std::to_string(count) + " tokens from " +
                                std::to_string(start) + " on of " + std::to_string(sequence.tokens.size()) +
                                "; every token of an encoder attends to all others, so they are computed in one step, "
                                "and share no pages");
}

void Runner::check_drafts(std::int32_t slot, std::int64_t end, std::int64_t count, std::int64_t num_drafts) {
  const Sequence& sequence = sequences().at(slot);
  const std::int64_t size = std::ssize(sequence.tokens);
  const std::int64_t most = std::min({count - 1, size - sequence.num_prompt_tokens, config_.max_logit_rows - 1});
  if (num_drafts < 0 || num_drafts > most || end < size || sequence.pooling)
    throw std::invalid_argument("slot " + std::to_string(slot) + ": num_drafts=" + std::to_string(num_drafts) +
                                " of a chunk of " + std::to_string(count) + " tokens that ends at " +
                                std::to_string(end) + " of " + std::to_string(size) +
                                "; it must be 0 where the chunk does not reach the end or the prompt is pooled, and " +
                                "here at most " + std::to_string(std::max<std::int64_t>(most, 0)));
}

void Runner::gather(std::int32_t index, std::int32_t slot, std::int64_t start, std::int64_t count,
                    std::int64_t num_drafts, Dims& dims) {
  Sequence& sequence = sequences().at(slot);
  const std::int64_t first = dim(dims, Dim::tokens), end = start + count;
  first_rows_.push_back(static_cast<std::int32_t>(first));
  const auto length = static_cast<std::int64_t>(sequence.tokens.size());
  for (std::int64_t i = 0; i < count; i++) {
    const std::int64_t position = start + i;
    inputs_.token_ids[first + i] = sequence.tokens[position];
    inputs_.positions[first + i] = static_cast<std::int32_t>(position);
    inputs_.token_types[first + i] = sequence.segment > 0 && position >= sequence.segment ? 1 : 0;
    inputs_.kv_slots[first + i] = std::int64_t{sequence.pages[position / config_.block_size]} * config_.block_size +
                                  position % config_.block_size;
  }
  clear_values(sequence, start, end);
  for (std::int64_t i = 0; i < count; i += config_.tokens_per_entry) {
    const std::int64_t tokens = std::min(config_.tokens_per_entry, count - i);
    const std::int64_t context = config_.bidirectional ? length : start + i + tokens;
    inputs_.entries[dim(dims, Dim::entries)++] = {first + i, tokens, start + i, sequence.pages.data(), context};
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
    if (synthetic_acceptance_) tasks_.back().num_given = take_given(num_drafts);
  }
  dim(dims, Dim::tokens) += count;
}

/// Opens the branches, each with the pages of its sequence up to the start, and of its own from there on.
void Runner::gather_branches(std::span<const std::int32_t> slots, std::span<const std::int64_t> starts,
                             std::span<const std::int64_t> num_drafts, std::span<const DraftBranch> branches,
                             Dims& dims, StepResult& result) {
  const std::vector<std::int32_t> future{0};  // any token: its row is made that of the future
  for (const auto& [index, given] : branches) {
    const auto i = static_cast<std::size_t>(index);
    const std::vector<std::int32_t>& tokens = given.empty() ? future : given;
    const std::int64_t position = std::ssize(sequences().at(slots[i]).tokens) - num_drafts[i];
    const std::int64_t length = std::ssize(tokens);
    const std::int32_t slot = sequences().open_branch(slots[i], position, tokens);
    branches_.push_back({index, slot});
    if (!fork(slot, slots[i], starts[i], position + length)) {
      sequences().close(slot);
      branches_.pop_back();
      continue;
    }
    gather(static_cast<std::int32_t>(slots.size() + branches_.size() - 1), slot, starts[i],
           position + length - starts[i], length, dims);
    if (given.empty()) {
      const auto row = static_cast<std::int32_t>(dim(dims, Dim::tokens) - 1);
      inputs_.token_ids[row] = config_.vocab_size;
      result.future_rows[index] = row;
      tasks_.pop_back();
    }
  }
}

/// Keeps the branches along which more tokens have been sampled than along what a sequence has kept so far.
void Runner::take_branches(std::span<const std::int32_t> slots, StepResult& result) {
  const auto computed = [&](std::int32_t slot) {
    return std::ranges::find(computed_, slot, &std::pair<std::int32_t, std::int64_t>::first);
  };
  for (std::size_t i = 0; i < branches_.size(); i++) {
    const auto from = slots.size() + i, to = static_cast<std::size_t>(branches_[i].index);
    const auto mine = computed(slots[to]), others = computed(branches_[i].slot);
    if (mine != computed_.end() && others != computed_.end()) {
      if (result.token_ids[from].size() > result.token_ids[to].size()) {
        sequences().adopt(slots[to], branches_[i].slot);
        mine->second = others->second;
        std::swap(result.token_ids[to], result.token_ids[from]);
        std::swap(result.logprobs[to], result.logprobs[from]);
        first_rows_[to] = first_rows_[from];
      }
    }
    if (others != computed_.end()) computed_.erase(others);
    result.errors.erase(static_cast<std::int32_t>(from));
  }
  close_branches();
  result.token_ids.resize(slots.size());
  result.logprobs.resize(slots.size());
  result.first_rows.assign(first_rows_.begin(), first_rows_.begin() + std::ssize(slots));
}

void Runner::close_branches() {
  for (const OpenBranch& branch : branches_) sequences().close(branch.slot);
  branches_.clear();
}

void Runner::set_synthetic_acceptance(double probability) {
  if (!(probability >= 0 && probability <= 1))
    throw std::invalid_argument("a synthetic acceptance must be a probability, from 0 to 1");
  synthetic_acceptance_ = probability;
}

/// Returns how many of these drafts are taken for right.
std::int32_t Runner::take_given(std::int64_t num_drafts) {
  std::uniform_real_distribution<double> random;
  std::int32_t given = 0;
  while (given < num_drafts && random(synthetic_random_) < *synthetic_acceptance_) given++;
  return given;
}

/// Where a step has few query tokens, the KV of those with a long context is split, so that all threads have work. The
/// bits do not depend on it: see emit/attention.py.
void Runner::split_attention(Dims& dims) {
  std::int64_t& entries = dim(dims, Dim::entries);
  std::int64_t &kv_splits = dim(dims, Dim::kv_splits), &reductions = dim(dims, Dim::reductions);
  if (entries < 0 || entries > config_.max_num_batched_tokens || reductions < 0 || kv_splits < 0 ||
      reductions > kv_splits || kv_splits > kMaxKvSplits)
    throw std::invalid_argument("entries=" + std::to_string(entries) + ", kv_splits=" + std::to_string(kv_splits) +
                                ", reductions=" + std::to_string(reductions) + " exceed the step inputs");
  if (config_.bidirectional || threads_.size() == 1 || entries * config_.kv_heads >= kItemsPerThread * threads_.size())
    return;
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

/// Attention multiplies all 32 values of a tile, those not written yet by 0. The page's previous owner may have left
/// NaN there, so the values of a tile that [start, end) begins and does not fill are cleared.
void Runner::clear_values(const Sequence& sequence, std::int64_t start, std::int64_t end) {
  const std::int64_t first = end / kTileTokens * kTileTokens;
  if (first == end || first < start) return;
  const std::int64_t page = sequence.pages[first / config_.block_size];
  const std::int64_t tile = (page * config_.block_size + first % config_.block_size) / kTileTokens;
  for (std::int64_t layer = 0; layer < config_.layers; layer++)
    for (std::int64_t head = 0; head < config_.kv_heads; head++)
      std::memset(kv().tile(layer, head, tile) + config_.value_offset, 0,
                  static_cast<std::size_t>(config_.tile_bytes - config_.value_offset));
}

void Runner::pool_states(std::span<const std::int32_t> slots, Dims& dims, StepResult& result) {
  const auto at_once = static_cast<std::size_t>(config_.max_logit_rows);
  const auto size = static_cast<std::size_t>(config_.hidden_size);
  for (std::size_t first = 0; first < state_rows_.size(); first += at_once) {
    const auto rows = std::span(state_rows_).subspan(first, std::min(state_rows_.size() - first, at_once));
    for (std::size_t i = 0; i < rows.size(); i++) inputs_.logit_rows[i] = rows[i].row;
    dim(dims, Dim::logit_rows) = static_cast<std::int64_t>(rows.size());
    hidden_states_.run(threads_, dims);
    for (std::size_t i = 0; i < rows.size(); i++)
      pool_state(rows[i].index, sequences().at(slots[rows[i].index]), {inputs_.hidden_states + i * size, size}, result);
  }
}

void Runner::pool_state(std::int32_t index, Sequence& sequence, std::span<const float> state, StepResult& result) {
  sequence.pooling->add(state);
  if (sequence.pooling->next() < sequence.pooling->end()) return;
  try {
    result.pooled[index] = sequence.pooling->vector(pooling_head_);
  } catch (const std::runtime_error& error) {
    result.errors[index] = error.what();
  }
}

void Runner::compute_logits(std::span<SamplingTask> tasks, Dims& dims) {
  std::int64_t& rows = dim(dims, Dim::logit_rows) = 0;
  for (SamplingTask& task : tasks) {
    task.logits = {inputs_.logits + rows * config_.logit_stride, static_cast<std::size_t>(config_.vocab_size)};
    for (std::int32_t i = 0; i < task.num_rows; i++) inputs_.logit_rows[rows++] = task.first_row + i;
  }
  head_.run(threads_, dims);
}

/// Constrained sequences are left to `collect`, unless their logits would be overwritten before.
void Runner::sample(TokenConstraint::Clock::time_point begun, Dims& dims, StepResult& result) {
  const bool has_others = std::ranges::any_of(tasks_, std::logical_not{}, &SamplingTask::constraint);
  for (std::size_t first = 0, last = 0; first < tasks_.size(); first = last) {
    for (std::int64_t rows = 0; last < tasks_.size(); last++)
      if ((rows += tasks_[last].num_rows) > config_.max_logit_rows) break;
    const auto tasks = std::span(tasks_).subspan(first, last - first);
    compute_logits(tasks, dims);
    const auto constrained = std::ranges::stable_partition(tasks, std::logical_not{}, &SamplingTask::constraint);
    const auto now = TokenConstraint::Clock::now();
    sampler_.begin(tasks, config_.logit_stride, now + (now - begun) / kPatience, has_others);
    const bool is_last = last == tasks_.size();
    const std::size_t end = is_last ? tasks.size() - constrained.size() : tasks.size();
    for (std::size_t i = 0; i < end; i++) take_next(end, result);
    if (is_last)
      for (const SamplingTask& task : constrained) result.pending.push_back(task.index);
  }
}

/// Returns the index of the sequence whose outcome it has taken.
std::int32_t Runner::take_next(std::size_t end, StepResult& result) {
  const SamplingTask& task = sampler_.next_task();
  SampledSpan& span = sampler_.take(end);
  num_taken_++;
  const bool has_failed = result.errors.contains(task.index);
  if (!has_failed && span.error.empty()) {
    take_span(task, span, result);
    return task.index;
  }
  if (!has_failed) result.errors[task.index] = std::move(span.error);
  if (task.samples) take_back(task, span);
  return task.index;
}

/// Shares pages only now that nothing can fail any more: a step that fails can be computed again.
void Runner::share_computed() {
  for (const auto& [slot, num_computed] : computed_) sequences().share(slot, num_computed);
  computed_.clear();
  if (kv_cache_->ledger && !sampler_.has_left()) kv_cache_->ledger->seal();
}

void Runner::take_span(const SamplingTask& task, SampledSpan& span, StepResult& result) {
  Sequence& sequence = *task.sequence;
  if (!task.samples) {
    result.prompt_logprobs[task.index].push_back({span.token_ids.front(), std::move(span.logprobs.front())});
    sequence.prompt_logprobs_done = task.position + 1;
    return;
  }
  sequence.tokens.resize(static_cast<std::size_t>(task.position));  // without drafts: those that hold are in the span
  sequence.tokens.insert(sequence.tokens.end(), span.token_ids.begin(), span.token_ids.end());
  sequence.num_followed = std::ssize(sequence.tokens);
  computed_.emplace_back(task.slot, std::min(sequence.num_followed - 1, task.position + task.num_rows - 1));
  result.token_ids[task.index] = std::move(span.token_ids);
  result.logprobs[task.index] = std::move(span.logprobs);
}

/// Ends sampling. Sequences whose outcome has not been taken keep neither drafts nor sampled tokens.
void Runner::cancel() {
  sampler_.cancel();
  for (const SamplingTask& task : std::span(tasks_).subspan(num_taken_))
    if (task.samples) task.sequence->tokens.resize(static_cast<std::size_t>(task.position));
}

}  // namespace quire
