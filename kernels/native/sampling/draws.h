#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "compute/thread_pool.h"
#include "compute/waitable.h"
#include "grammar/token_rule.h"
#include "kv_cache/sequences.h"
#include "sampling/sampler.h"

namespace quire {

/// A row of logits, of which a token is drawn, or the log probability of a prompt token is told.
struct LogitRow {
  std::int32_t index;  ///< in the batch
  std::int32_t slot;
  Sequence* sequence;
  std::int32_t row;       ///< in the step's tokens
  std::int64_t position;  ///< of the token that the logits predict
  bool sample;            ///< draw it, or else report the prompt token that stands there
  TokenRule* rule = nullptr;
  std::span<float> logits = {};
};

/// What came of a row.
struct Drawn {
  SampleResult result{};
  std::string error{};
  bool is_late = false;  ///< the rule could not be asked in time: nothing is drawn
  Waitable is_done{};    ///< 1 if it is
};

/// Draws from rows of logits, one by one, by all threads; the caller takes them in order, and may do other things in
/// between. While any is left to be taken, the threads can't be used for anything else.
class Draws {
 public:
  using Clock = TokenRule::Clock;

  explicit Draws(ThreadPool& threads);
  ~Draws();
  Draws(const Draws&) = delete;
  Draws& operator=(const Draws&) = delete;

  /// Rules are waited for until `soon`, but where nobody else draws (`has_others`) for longer, until one is ready.
  void begin(std::span<const LogitRow> rows, Clock::time_point soon, bool has_others);

  bool is_any_left() const { return is_running_; }                         ///< to be taken
  const LogitRow& next_row() const { return rows_[num_taken_]; }           ///< to be taken
  bool is_next_done() const { return drawn_[num_taken_].is_done.load(); }  ///< so that `take` would not wait

  /// What came of `next_row`. While another thread is at it, those of the first `end` rows that nobody is at are drawn
  /// here, unless their rule is late.
  Drawn& take(std::size_t end);

  /// Nobody begins with another row; those who have begun are waited for.
  void stop();

 private:
  bool draw_next(int thread);
  bool is_worth_a_draw(std::size_t end) const;
  Clock::time_point deadline() const { return has_others_.load() ? soon_ : late_; }
  bool await_rule(TokenRule& rule);
  void draw(const LogitRow& row, SamplerScratch& scratch, Drawn& drawn);

  ThreadPool& threads_;
  std::vector<SamplerScratch> scratch_;  ///< one per thread
  std::span<const LogitRow> rows_;
  std::vector<Drawn> drawn_;
  std::atomic<std::size_t> next_{0};  ///< row that nobody has begun with
  std::size_t num_taken_ = 0;
  Clock::time_point soon_, late_;        ///< deadlines of rules
  std::atomic<bool> has_others_{false};  ///< who draw, or have drawn
  bool is_running_ = false;
  bool is_alone_ = false;  ///< the caller, no other thread draws
};

}  // namespace quire
