#include "runner.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <stdexcept>

#include "first_touch.h"

namespace quire {
namespace {

constexpr std::int64_t kItemsPerThread = 2;             // of attention; with fewer, threads would wait for each other
constexpr int kPatience = 20;                           // the part of a step that is spent on waiting for a late mask
constexpr std::chrono::milliseconds kLongestWait{100};  // where nobody waits but those whose mask is late

std::int64_t& dim(Dims& dims, Dim name) { return dims[static_cast<std::size_t>(name)]; }

}  // namespace

Runner::Runner(const RunnerConfig& config)
    : config_(config),
      threads_(config.threads, config.pin),
      kv_(arena_, threads_, {config.layers, config.kv_heads, config.tile_bytes, config.page_size, config.num_pages}),
      sequences_(config.num_pages, config.page_size, config.vocab_size, kv_.stripe()),
      scratch_(static_cast<std::size_t>(config.threads)) {
  const auto capacity = static_cast<std::size_t>(config.capacity);
  const auto rows = static_cast<std::size_t>(config.logit_capacity);
  auto array = [&]<class T>(T*& target, std::size_t count) {
    target = static_cast<T*>(arena_.allocate(count * sizeof(T)));
  };
  array(inputs_.token_ids, capacity);
  array(inputs_.positions, capacity);
  array(inputs_.kv_slots, capacity);
  array(inputs_.entries, capacity);
  array(inputs_.parts, kMostParts);
  array(inputs_.splits, kMostParts);
  array(inputs_.logit_rows, rows);
  array(inputs_.logits, rows * static_cast<std::size_t>(config.logit_stride));
  array(inputs_.states, rows * static_cast<std::size_t>(config.hidden_size));
}

void* Runner::allocate_by_node(std::size_t bytes) {
  void* memory = arena_.allocate(bytes);
  if (threads_.nodes() > 1) touch_by_node(threads_, static_cast<std::byte*>(memory), bytes);
  return memory;
}

StepResult Runner::step(std::span<const std::int32_t> slots, std::span<const std::int64_t> starts,
                        std::span<const std::int64_t> counts, std::span<const RowMask> masks) {
  const auto begun = TokenMask::Clock::now();
  check(slots, starts, counts);
  if (const PagePool& pages = sequences_.pages(); pages.held_pages() > pages.opened() / 4)
    kv_.prepare(pages.opened() + kv_.stripe());  // at a half the next stripe is opened
  Dims dims{};
  dim(dims, Dim::capacity) = config_.capacity;
  dim(dims, Dim::kv_tiles) = kv_.tiles();
  rows_.clear();
  state_rows_.clear();
  for (std::size_t i = 0; i < slots.size(); i++)
    gather(static_cast<std::int32_t>(i), slots[i], starts[i], counts[i], dims);
  set_masks(masks, slots.size());
  split_attention(dims);
  body_.run(threads_, dims);

  StepResult result;
  result.token_ids.assign(slots.size(), -1);
  result.logprobs.resize(slots.size());
  pool_states(slots, dims, result);
  const auto at_once = static_cast<std::size_t>(config_.logit_capacity);
  kept_logits_.clear();
  if (rows_.size() > at_once) {
    const auto overwritten = std::span(rows_).first((rows_.size() - 1) / at_once * at_once);
    kept_logits_.reserve(
        static_cast<std::size_t>(std::ranges::count_if(overwritten, &LogitRow::ahead) * config_.vocab_size));
  }
  for (std::size_t first = 0; first < rows_.size(); first += at_once) {
    const auto rows = std::span(rows_).subspan(first, std::min(rows_.size() - first, at_once));
    compute_logits(rows, dims);
    if (!masks.empty()) await_masks(rows, begun);
    std::vector<Drawn> drawn = read_logits(rows);
    for (std::size_t i = 0; i < rows.size(); i++)
      if (!rows[i].late && !result.errors.contains(rows[i].index)) take(rows[i], std::move(drawn[i]), result);
    if (first + at_once < rows_.size()) keep_logits(rows);
  }
  std::vector<std::int64_t> ends(slots.size());
  for (std::size_t i = 0; i < slots.size(); i++) ends[i] = starts[i] + counts[i];
  for (const LogitRow& row : rows_) ends[row.index] -= row.late;
  for (std::size_t i = 0; i < slots.size(); i++)
    if (!result.errors.contains(static_cast<std::int32_t>(i))) sequences_.share(slots[i], ends[i]);
  return result;
}

bool Runner::guess_again(StepResult& result, std::int32_t index, const std::function<bool(std::int32_t)>& takes) {
  LogitRow& row = row_ahead(index);
  const SamplingState& sampling = sequences_.at(row.slot).sampling;
  const std::vector<std::int32_t> tokens = guesses(row.logits, sampling, row.position, scratch_.front());
  const auto taken = std::find_if(tokens.begin() + 1, tokens.end(), takes);
  if (taken == tokens.end()) return false;
  row.ahead = false;
  take_another(row, {report(*taken, row.logits, sampling, scratch_.front()), {}}, result);
  return true;
}

void Runner::redraw(StepResult& result, std::span<const RowMask> masks) {
  std::vector<LogitRow> rows;
  for (const RowMask& each : masks) {
    if (each.mask == nullptr) throw std::invalid_argument("a token can't be drawn again without a mask");
    LogitRow& row = row_ahead(each.index);
    row.ahead = false;
    row.mask = each.mask;
    rows.push_back(row);
  }
  std::vector<Drawn> drawn = read_logits(rows);
  for (std::size_t i = 0; i < rows.size(); i++) take_another(rows[i], std::move(drawn[i]), result);
}

Runner::LogitRow& Runner::row_ahead(std::int32_t index) {
  const auto row = std::ranges::find_if(rows_, [&](const LogitRow& each) { return each.ahead && each.index == index; });
  if (row == rows_.end())
    throw std::invalid_argument("sequence " + std::to_string(index) + " of the last step did not draw without a mask");
  return *row;
}

void Runner::take(const LogitRow& row, Drawn drawn, StepResult& result) {
  Sequence& sequence = sequences_.at(row.slot);
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

void Runner::take_another(const LogitRow& row, Drawn drawn, StepResult& result) {
  const std::int32_t token = drawn.error.empty() ? drawn.result.token : -1;
  result.token_ids[row.index] = token;
  if (token < 0) {
    result.errors[row.index] = std::move(drawn.error);
  } else {
    result.logprobs[row.index] = std::move(drawn.result.logprobs);
    sequences_.at(row.slot).replace_last(token);
  }
}

void Runner::set_masks(std::span<const RowMask> masks, std::size_t num_sequences) {
  if (masks.empty()) return;
  std::vector<const RowMask*> of_sequence(num_sequences);
  for (const RowMask& each : masks) of_sequence.at(static_cast<std::size_t>(each.index)) = &each;
  for (LogitRow& row : rows_) {
    if (!row.sample || of_sequence[row.index] == nullptr) continue;
    row.mask = of_sequence[row.index]->mask;
    row.ahead = row.mask == nullptr;
    if (row.ahead && !sequences_.at(row.slot).sampling.draws_from_all())
      throw std::invalid_argument("slot " + std::to_string(row.slot) +
                                  " does not draw from all tokens alike, so that its mask must be known first");
  }
}

/// Others wait for a mask no longer than a small part of what the step has taken so far. Where nobody else would draw,
/// the step waits for the first one.
void Runner::await_masks(std::span<LogitRow> rows, TokenMask::Clock::time_point begun) {
  const auto now = TokenMask::Clock::now();
  const auto soon = now + (now - begun) / kPatience;
  bool any = std::ranges::any_of(rows_, [](const LogitRow& row) { return row.mask == nullptr; });
  for (LogitRow& row : rows) {
    if (row.mask == nullptr) continue;
    row.late = !row.mask->wait_until(any ? soon : now + kLongestWait);
    any |= !row.late;
  }
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
  if (total > config_.capacity)
    throw std::invalid_argument("a step of " + std::to_string(total) + " tokens exceeds the capacity of " +
                                std::to_string(config_.capacity));
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
      rows_.push_back({index, slot, static_cast<std::int32_t>(first + next - 1 - start), next, false});
  if (sequence.pooling) {
    for (std::int64_t next = std::max(start, sequence.pooling->next()); next < end; next++)
      state_rows_.push_back({index, static_cast<std::int32_t>(first + next - start)});
  } else if (end == length) {
    rows_.push_back({index, slot, static_cast<std::int32_t>(first + count - 1), length, true});
  }
  dim(dims, Dim::tokens) += count;
}

/// Where a step has few query tokens, those with a long context are split into blocks, so that all threads have work.
/// The bits don't depend on it: see emit/attention.py.
void Runner::split_attention(Dims& dims) {
  std::int64_t& entries = dim(dims, Dim::entries);
  std::int64_t &parts = dim(dims, Dim::parts), &splits = dim(dims, Dim::splits);
  if (threads_.size() == 1 || entries * config_.kv_heads >= kItemsPerThread * threads_.size()) return;
  std::int64_t kept = 0;
  for (std::int64_t i = 0; i < entries; i++) {
    const AttentionEntry entry = inputs_.entries[i];
    const std::int64_t blocks = (entry.position + kBlockTokens) / kBlockTokens;
    if (entry.tokens > 1 || blocks == 1 || parts + blocks > kMostParts) {
      inputs_.entries[kept++] = entry;
      continue;
    }
    inputs_.splits[splits++] = {entry.row, parts, blocks};
    for (std::int64_t block = 0; block < blocks; block++)
      inputs_.parts[parts++] = {entry.row, entry.position, entry.pages, block};
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
  const auto at_once = static_cast<std::size_t>(config_.logit_capacity);
  const auto size = static_cast<std::size_t>(config_.hidden_size);
  for (std::size_t first = 0; first < state_rows_.size(); first += at_once) {
    const auto rows = std::span(state_rows_).subspan(first, std::min(state_rows_.size() - first, at_once));
    for (std::size_t i = 0; i < rows.size(); i++) inputs_.logit_rows[i] = rows[i].row;
    dim(dims, Dim::logit_rows) = static_cast<std::int64_t>(rows.size());
    states_.run(threads_, dims);
    for (std::size_t i = 0; i < rows.size(); i++)
      pool_state(rows[i].index, sequences_.at(slots[rows[i].index]), {inputs_.states + i * size, size}, result);
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

/// Other rows are about to be computed where theirs stand.
void Runner::keep_logits(std::span<LogitRow> rows) {
  for (LogitRow& row : rows) {
    if (!row.ahead) continue;
    const std::size_t begin = kept_logits_.size();
    kept_logits_.insert(kept_logits_.end(), row.logits.begin(), row.logits.end());
    row.logits = std::span(kept_logits_).subspan(begin);
  }
}

std::vector<Runner::Drawn> Runner::read_logits(std::span<const LogitRow> rows) {
  std::vector<Drawn> drawn(rows.size());
  if (rows.size() == 1) {
    if (!rows[0].late) drawn[0] = read_row(rows[0], scratch_.front());
    return drawn;
  }
  std::atomic<std::size_t> next{0};
  threads_.run([&](int thread) {
    for (std::size_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < rows.size();)
      if (!rows[i].late) drawn[i] = read_row(rows[i], scratch_[thread]);
  });
  return drawn;
}

Runner::Drawn Runner::read_row(const LogitRow& row, SamplerScratch& scratch) {
  const Sequence& sequence = sequences_.at(row.slot);
  try {
    if (!row.sample) {
      const std::int32_t token = sequence.tokens[row.position];
      return {{token, logprobs_of(row.logits, token, sequence.sampling.config().prompt_logprobs, scratch)}, {}};
    }
    return {sample(row.logits, sequence.sampling, sequence.tokens, row.position, scratch, row.mask), {}};
  } catch (const std::runtime_error& error) {
    return {{}, error.what()};
  }
}

}  // namespace quire
