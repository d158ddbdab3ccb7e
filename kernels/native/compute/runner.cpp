#include "compute/runner.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <functional>
#include <stdexcept>
#include <utility>

#include "compute/first_touch.h"

namespace quire {
namespace {

constexpr std::int64_t kItemsPerThread = 2;  // of attention; with fewer, threads would wait for each other
constexpr int kPatience = 20;                // the part of a step that is spent on waiting for a late rule

std::int64_t& dim(Dims& dims, Dim name) { return dims[static_cast<std::size_t>(name)]; }

}  // namespace

Runner::Runner(const RunnerConfig& config)
    : config_(config),
      threads_(config.threads, config.pin),
      kv_(arena_, threads_, {config.layers, config.kv_heads, config.tile_bytes, config.page_size, config.num_pages}),
      sequences_(config.num_pages, config.page_size, config.vocab_size, kv_.extent()),
      draws_(threads_) {
  const auto capacity = static_cast<std::size_t>(config.max_num_batched_tokens);
  const auto rows = static_cast<std::size_t>(config.max_logit_rows);
  auto array = [&]<class T>(T*& target, std::size_t count) {
    target = static_cast<T*>(arena_.allocate(count * sizeof(T)));
  };
  array(inputs_.token_ids, capacity);
  array(inputs_.positions, capacity);
  array(inputs_.kv_slots, capacity);
  array(inputs_.entries, capacity);
  array(inputs_.kv_splits, kMaxKvSplits);
  array(inputs_.reductions, kMaxKvSplits);
  array(inputs_.logit_rows, rows);
  array(inputs_.logits, rows * static_cast<std::size_t>(config.logit_stride));
  array(inputs_.hidden_states, rows * static_cast<std::size_t>(config.hidden_size));
}

void* Runner::allocate_by_node(std::size_t bytes) {
  void* memory = arena_.allocate(bytes);
  if (threads_.nodes() > 1) touch_by_node(threads_, static_cast<std::byte*>(memory), bytes);
  return memory;
}

StepResult Runner::step(std::span<const std::int32_t> slots, std::span<const std::int64_t> starts,
                        std::span<const std::int64_t> counts) {
  const auto begun = TokenRule::Clock::now();
  if (draws_.is_any_left()) throw std::logic_error("the last step is to be settled before the next one");
  check(slots, starts, counts);
  if (const PagePool& pages = sequences_.pages(); pages.held_pages() > pages.committed() / 4)
    kv_.prefault(pages.committed() + kv_.extent());  // at a half the next extent is committed
  Dims dims{};
  dim(dims, Dim::max_num_batched_tokens) = config_.max_num_batched_tokens;
  dim(dims, Dim::kv_tiles) = kv_.tiles();
  rows_.clear();
  state_rows_.clear();
  for (std::size_t i = 0; i < slots.size(); i++)
    gather(static_cast<std::int32_t>(i), slots[i], starts[i], counts[i], dims);
  num_sequences_ = slots.size();
  split_attention(dims);
  body_.run(threads_, dims);

  StepResult result;
  result.token_ids.assign(slots.size(), -1);
  result.logprobs.resize(slots.size());
  pool_states(slots, dims, result);
  try {
    draw(begun, dims, result);
  } catch (...) {
    draws_.stop();
    throw;
  }
  std::vector<bool> is_drawn(slots.size());  // now or later, and shared then
  for (const LogitRow& row : rows_) is_drawn[row.index] = is_drawn[row.index] || row.sample;
  for (std::size_t i = 0; i < slots.size(); i++)
    if (!is_drawn[i] && !result.errors.contains(static_cast<std::int32_t>(i)))
      sequences_.share(slots[i], starts[i] + counts[i]);
  return result;
}

std::vector<std::int32_t> Runner::settle(StepResult& result) {
  if (result.token_ids.size() != num_sequences_)
    throw std::invalid_argument("a result of " + std::to_string(result.token_ids.size()) +
                                " sequences is not that of the last step, which had " + std::to_string(num_sequences_));
  std::vector<std::int32_t> told;
  try {
    while (draws_.is_any_left() && (told.empty() || draws_.is_next_done()))
      told.push_back(take_next(rows_.size(), result).index);
  } catch (...) {
    draws_.stop();
    throw;
  }
  return told;
}

bool Runner::fork(std::int32_t slot, std::int32_t source, std::int64_t num_computed, std::int64_t num_tokens) {
  if (!sequences_.fork(slot, source, num_computed, num_tokens)) return false;
  const auto place = static_cast<std::size_t>(num_computed / config_.page_size);
  const std::int64_t tiles = (num_computed % config_.page_size + kTileTokens - 1) / kTileTokens;
  if (tiles == 0) return true;
  const std::int64_t page_tiles = kv_.tiles_of_page();
  const std::int64_t from = sequences_.at(source).pages[place] * page_tiles;
  const std::int64_t to = sequences_.at(slot).pages[place] * page_tiles;
  for (std::int64_t layer = 0; layer < config_.layers; layer++)
    for (std::int64_t head = 0; head < config_.kv_heads; head++)
      std::memcpy(kv_.tile(layer, head, to), kv_.tile(layer, head, from),
                  static_cast<std::size_t>(tiles * config_.tile_bytes));
  return true;
}

void Runner::check(std::span<const std::int32_t> slots, std::span<const std::int64_t> starts,
                   std::span<const std::int64_t> counts) {
  if (slots.size() != starts.size() || slots.size() != counts.size())
    throw std::invalid_argument("slots, starts and counts differ in length");
  std::int64_t total = 0;
  for (std::size_t i = 0; i < slots.size(); i++) {
    const Sequence& sequence = sequences_.at(slots[i]);
    const std::int64_t end = starts[i] + counts[i];
    if (starts[i] < 0 || counts[i] < 1 || end > static_cast<std::int64_t>(sequence.tokens.size()))
      throw std::invalid_argument("slot " + std::to_string(slots[i]) + ": tokens [" + std::to_string(starts[i]) + ", " +
                                  std::to_string(end) + ") are not among its " +
                                  std::to_string(sequence.tokens.size()));
    if (end > static_cast<std::int64_t>(sequence.pages.size()) * config_.page_size)
      throw std::invalid_argument("slot " + std::to_string(slots[i]) + ": its " +
                                  std::to_string(sequence.pages.size()) + " pages don't cover " + std::to_string(end) +
                                  " tokens; reserve them first");
    if (sequence.pooling && starts[i] > sequence.pooling->next())
      throw std::invalid_argument("slot " + std::to_string(slots[i]) + ": the hidden state of token " +
                                  std::to_string(sequence.pooling->next()) + " is to be pooled next, and token " +
                                  std::to_string(starts[i]) + " to be computed");
    total += counts[i];
  }
  if (total > config_.max_num_batched_tokens)
    throw std::invalid_argument("a step of " + std::to_string(total) + " tokens exceeds the capacity of " +
                                std::to_string(config_.max_num_batched_tokens));
}

void Runner::gather(std::int32_t index, std::int32_t slot, std::int64_t start, std::int64_t count, Dims& dims) {
  Sequence& sequence = sequences_.at(slot);
  const std::int64_t first = dim(dims, Dim::tokens), end = start + count;
  const auto length = static_cast<std::int64_t>(sequence.tokens.size());
  for (std::int64_t i = 0; i < count; i++) {
    const std::int64_t position = start + i;
    inputs_.token_ids[first + i] = sequence.tokens[position];
    inputs_.positions[first + i] = static_cast<std::int32_t>(position);
    inputs_.kv_slots[first + i] =
        std::int64_t{sequence.pages[position / config_.page_size]} * config_.page_size + position % config_.page_size;
  }
  clear_values(sequence, start, end);
  for (std::int64_t i = 0; i < count; i += config_.tokens_per_entry)
    inputs_.entries[dim(dims, Dim::entries)++] = {first + i, std::min(config_.tokens_per_entry, count - i), start + i,
                                                  sequence.pages.data()};
  if (sequence.sampling.config().prompt_logprobs >= 0)
    for (std::int64_t next = std::max(start + 1, sequence.prompt_logprobs_done);
         next <= end && next < sequence.num_prompt_tokens; next++)
      rows_.push_back({index, slot, &sequence, static_cast<std::int32_t>(first + next - 1 - start), next, false});
  if (sequence.pooling) {
    for (std::int64_t next = std::max(start, sequence.pooling->next()); next < end; next++)
      state_rows_.push_back({index, static_cast<std::int32_t>(first + next - start)});
  } else if (end == length) {
    rows_.push_back(
        {index, slot, &sequence, static_cast<std::int32_t>(first + count - 1), length, true, sequence.rule.get()});
  }
  dim(dims, Dim::tokens) += count;
}

/// Where a step has few query tokens, those with a long context are split into blocks, so that all threads have work.
/// The bits don't depend on it: see emit/attention.py.
void Runner::split_attention(Dims& dims) {
  std::int64_t& entries = dim(dims, Dim::entries);
  std::int64_t &parts = dim(dims, Dim::kv_splits), &splits = dim(dims, Dim::reductions);
  if (threads_.size() == 1 || entries * config_.kv_heads >= kItemsPerThread * threads_.size()) return;
  std::int64_t kept = 0;
  for (std::int64_t i = 0; i < entries; i++) {
    const AttentionEntry entry = inputs_.entries[i];
    const std::int64_t blocks = (entry.position + kBlockTokens) / kBlockTokens;
    if (entry.tokens > 1 || blocks == 1 || parts + blocks > kMaxKvSplits) {
      inputs_.entries[kept++] = entry;
      continue;
    }
    inputs_.reductions[splits++] = {entry.row, parts, blocks};
    for (std::int64_t block = 0; block < blocks; block++)
      inputs_.kv_splits[parts++] = {entry.row, entry.position, entry.pages, block};
  }
  entries = kept;
}

/// Attention multiplies all 32 values of a tile, those not written yet by 0. What the page's last owner left there may
/// be NaN, so the values of a tile that is begun and not filled by [start, end) are cleared.
void Runner::clear_values(const Sequence& sequence, std::int64_t start, std::int64_t end) {
  const std::int64_t first = end / kTileTokens * kTileTokens;
  if (first == end || first < start) return;
  const std::int64_t page = sequence.pages[first / config_.page_size];
  const std::int64_t tile = (page * config_.page_size + first % config_.page_size) / kTileTokens;
  for (std::int64_t layer = 0; layer < config_.layers; layer++)
    for (std::int64_t head = 0; head < config_.kv_heads; head++)
      std::memset(kv_.tile(layer, head, tile) + config_.value_offset, 0,
                  static_cast<std::size_t>(config_.tile_bytes - config_.value_offset));
}

void Runner::pool_states(std::span<const std::int32_t> slots, Dims& dims, StepResult& result) {
  const auto at_once = static_cast<std::size_t>(config_.max_logit_rows);
  const auto size = static_cast<std::size_t>(config_.hidden_size);
  for (std::size_t first = 0; first < state_rows_.size(); first += at_once) {
    const auto rows = std::span(state_rows_).subspan(first, std::min(state_rows_.size() - first, at_once));
    for (std::size_t i = 0; i < rows.size(); i++) inputs_.logit_rows[i] = rows[i].row;
    dim(dims, Dim::logit_rows) = static_cast<std::int64_t>(rows.size());
    states_.run(threads_, dims);
    for (std::size_t i = 0; i < rows.size(); i++)
      pool_state(rows[i].index, sequences_.at(slots[rows[i].index]), {inputs_.hidden_states + i * size, size}, result);
  }
}

void Runner::pool_state(std::int32_t index, Sequence& sequence, std::span<const float> state, StepResult& result) {
  sequence.pooling->add(state);
  if (sequence.pooling->next() < std::ssize(sequence.tokens)) return;
  try {
    result.pooled[index] = sequence.pooling->vector();
  } catch (const std::runtime_error& error) {
    result.errors[index] = error.what();
  }
}

void Runner::compute_logits(std::span<LogitRow> rows, Dims& dims) {
  for (std::size_t i = 0; i < rows.size(); i++) {
    inputs_.logit_rows[i] = rows[i].row;
    rows[i].logits = {inputs_.logits + static_cast<std::int64_t>(i) * config_.logit_stride,
                      static_cast<std::size_t>(config_.vocab_size)};
  }
  dim(dims, Dim::logit_rows) = static_cast<std::int64_t>(rows.size());
  head_.run(threads_, dims);
}

/// Those with rules are left to `settle`, unless their logits would be overwritten before.
void Runner::draw(TokenRule::Clock::time_point begun, Dims& dims, StepResult& result) {
  const bool has_others = std::ranges::any_of(rows_, std::logical_not{}, &LogitRow::rule);
  const auto at_once = static_cast<std::size_t>(config_.max_logit_rows);
  for (std::size_t first = 0; first < rows_.size(); first += at_once) {
    const auto rows = std::span(rows_).subspan(first, std::min(rows_.size() - first, at_once));
    compute_logits(rows, dims);
    const auto ruled = std::ranges::stable_partition(rows, std::logical_not{}, &LogitRow::rule);
    const auto now = TokenRule::Clock::now();
    draws_.begin(rows, now + (now - begun) / kPatience, has_others);
    const bool is_last = first + rows.size() == rows_.size();
    const std::size_t end = is_last ? rows.size() - ruled.size() : rows.size();
    for (std::size_t i = 0; i < end; i++) take_next(end, result);
    if (is_last)
      for (const LogitRow& row : ruled) result.token_ids[row.index] = kDrawnLater;
  }
}

const LogitRow& Runner::take_next(std::size_t end, StepResult& result) {
  const LogitRow& row = draws_.next_row();
  Drawn& drawn = draws_.take(end);
  if (row.sample) result.token_ids[row.index] = -1;
  if (result.errors.contains(row.index)) return row;
  if (!drawn.is_late) take(row, drawn, result);
  if (row.sample && !result.errors.contains(row.index)) sequences_.share(row.slot, row.position - drawn.is_late);
  return row;
}

void Runner::take(const LogitRow& row, Drawn& drawn, StepResult& result) {
  Sequence& sequence = *row.sequence;
  if (!drawn.error.empty()) {
    result.errors[row.index] = std::move(drawn.error);
  } else if (row.sample) {
    result.token_ids[row.index] = drawn.result.token;
    result.logprobs[row.index] = std::move(drawn.result.logprobs);
    sequence.append(drawn.result.token);
  } else {
    result.prompt_logprobs[row.index].push_back({drawn.result.token, std::move(*drawn.result.logprobs)});
    sequence.prompt_logprobs_done = row.position + 1;
  }
}

}  // namespace quire
