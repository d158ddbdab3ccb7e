#include "sampling/draws.h"

#include <algorithm>
#include <chrono>
#include <exception>

namespace quire {
namespace {

constexpr std::chrono::milliseconds kLongestWait{100};  // where nobody waits but those whose rule is late
constexpr std::chrono::milliseconds kLook{1};           // then this often at whether somebody has drawn

}  // namespace

Draws::Draws(ThreadPool& threads) : threads_(threads), scratch_(static_cast<std::size_t>(threads.size())) {}

Draws::~Draws() { stop(); }

void Draws::begin(std::span<const LogitRow> rows, Clock::time_point soon, bool has_others) {
  rows_ = rows;
  drawn_ = std::vector<Drawn>(rows.size());
  next_ = 0;
  num_taken_ = 0;
  soon_ = soon;
  late_ = Clock::now() + kLongestWait;
  has_others_ = has_others;
  is_running_ = !rows.empty();
  is_alone_ = rows.size() <= 1 && has_others;  // who waits for it has it sooner than another thread would come
  if (is_alone_ || !is_running_) return;
  threads_.begin(
      [](void* draws, int thread) {
        while (static_cast<Draws*>(draws)->draw_next(thread)) {
        }
      },
      this);
}

Drawn& Draws::take(std::size_t end) {
  Drawn& drawn = drawn_[num_taken_];
  while (drawn.is_done.load() == 0)
    if (!is_worth_a_draw(end) || !draw_next(0)) threads_.wait_while(drawn.is_done, 0);
  if (++num_taken_ == rows_.size()) stop();
  return drawn;
}

void Draws::stop() {
  if (!is_running_) return;
  is_running_ = false;
  next_ = rows_.size();
  if (!is_alone_) threads_.finish();
}

/// Whether the caller should draw the next row: the one that it waits for, or another that it need not wait for.
bool Draws::is_worth_a_draw(std::size_t end) const {
  const std::size_t next = next_.load(std::memory_order_relaxed);
  if (next >= std::min(end, rows_.size())) return false;
  TokenRule* const rule = rows_[next].rule;
  return next == num_taken_ || rule == nullptr || rule->wait_until({});
}

/// False if there is none that nobody has begun with.
bool Draws::draw_next(int thread) {
  const std::size_t i = next_.fetch_add(1, std::memory_order_relaxed);
  if (i >= rows_.size()) return false;
  draw(rows_[i], scratch_[thread], drawn_[i]);
  drawn_[i].is_done.store(1);
  return true;
}

/// Whether it can be asked.
bool Draws::await_rule(TokenRule& rule) {
  do {
    if (rule.wait_until(std::min(deadline(), Clock::now() + kLook))) {
      has_others_.store(true);
      return true;
    }
  } while (Clock::now() < deadline());
  return false;
}

void Draws::draw(const LogitRow& row, SamplerScratch& scratch, Drawn& drawn) {
  const Sequence& sequence = *row.sequence;
  try {
    if (!row.sample) {
      const std::int32_t token = sequence.tokens[row.position];
      drawn.result = {token, logprobs_of(row.logits, token, sequence.sampling.config().prompt_logprobs, scratch)};
      return;
    }
    drawn.is_late = row.rule != nullptr && !await_rule(*row.rule);
    if (drawn.is_late) return;
    drawn.result = sample(row.logits, sequence.sampling, sequence.tokens, row.position, scratch, row.rule);
    if (row.rule != nullptr) row.rule->follow(drawn.result.token);
  } catch (const std::exception& error) {
    drawn.error = error.what();
  }
}

}  // namespace quire
