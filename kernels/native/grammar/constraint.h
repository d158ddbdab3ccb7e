#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <vector>

#include "grammar/llguidance.h"
#include "grammar/token_constraint.h"
#include "grammar/token_mask.h"

namespace quire {

/// A request's place in its grammar: what it may draw next, and what must follow.
///
/// Tokens that are forced may be given to the request at once. The mask of the others is written when it is needed, or
/// ahead of that by another thread. From `begin_mask` to the end of `write_mask` the constraint belongs to that thread:
/// others may only wait, ask for `mask_seconds`, and find that it can't `restart`.
class Constraint final : public TokenConstraint {
 public:
  /// `stop_token_ids` end the text where it may end; eos tokens that are none of them come only where nothing else may.
  Constraint(const Matcher& grammar, std::int32_t vocab_size, std::vector<std::int32_t> stop_token_ids);

  /// Goes back to the beginning of the grammar, for another request; what is known of the grammar by now makes that one
  /// faster. False, and it is of no use any more, if it can't.
  bool restart();

  /// Tokens of all requests. Each may have left a KiB of lexer states.
  std::int64_t num_followed() const { return num_followed_; }

  /// Takes these stop tokens instead, at the beginning.
  void stop_at(std::vector<std::int32_t> stop_token_ids);

  bool wait_until(Clock::time_point deadline) override;
  bool allows(std::int32_t token) override;
  const TokenMask& mask() override;  ///< Throws std::runtime_error if there is an `error`.
  void follow(std::int32_t token) override;
  std::optional<std::int32_t> take_forced() override;
  void rollback(std::int64_t num_tokens) override;

  /// Must come next, in this order; the grammar has them behind it already.
  std::size_t num_forced() const { return forced_.size(); }

  /// Whether the text is whole, and nothing may follow.
  bool is_complete() const { return is_stopped_ && forced_.empty(); }

  /// Whether it allows nothing more, or there is an `error`.
  bool has_ended() const override { return is_complete() || error_; }

  /// Why it can't go on.
  const std::optional<std::string>& error() const { return error_; }

  /// What the next mask is likely to take.
  double mask_seconds() const { return matcher_.mask_seconds(); }

  /// Whether the mask is still to be written; the caller does so then.
  bool begin_mask();
  void write_mask();  ///< Throws nothing: an `error` is told by what needs the mask.

 private:
  void force();
  void ask_mask();
  void ban_ignored();
  void fail();

  Matcher matcher_;
  std::int32_t vocab_size_;
  std::vector<std::int32_t> stop_token_ids_;
  std::vector<std::int32_t> ignored_;  ///< eos tokens that don't stop
  std::deque<std::int32_t> forced_;
  std::optional<std::string> error_;
  std::int64_t num_followed_ = 0;
  bool is_stopped_ = false;
  bool is_past_stop_ = false;          ///< the last token was one that stops, which the matcher has not taken
  std::atomic<bool> has_mask_{false};  ///< or is going to have it; others may look while one draws
  TokenMask mask_;
};

}  // namespace quire
