#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "grammar/llguidance.h"
#include "grammar/token_constraint.h"

namespace quire {

/// The position of a request in its grammar: the tokens that may come next, and those that must.
///
/// The grammar is always past the forced tokens already. The mask of a token that is not forced is written when it is
/// needed, or before by another thread. From `begin_mask` to the end of `write_mask` the constraint belongs to that
/// thread: others may only wait and ask for `mask_seconds`, `forced` and `num_allowed`; `restart` and `rollback` fail.
class Constraint final : public TokenConstraint {
 public:
  /// `stop_token_ids` end the text where it may end; other eos tokens come only where nothing else may.
  Constraint(const Matcher& grammar, std::int32_t vocab_size, std::vector<std::int32_t> stop_token_ids);

  /// Goes back to the beginning of the grammar, for another request, which is faster by what is known of the grammar by
  /// now. Returns false if it cannot; then it must not be used again.
  bool restart();

  /// Advances past tokens that were generated before, at the beginning of the grammar. Throws std::invalid_argument for
  /// one that the grammar does not allow.
  void replay(std::span<const std::int32_t> tokens);

  /// Number of tokens that it has advanced past for all its requests. Each may have left a KiB of lexer states.
  std::int64_t num_followed() const { return num_followed_; }

  /// Replaces the stop tokens, at the beginning of the grammar.
  void stop_at(std::vector<std::int32_t> stop_token_ids);

  bool wait_until(Clock::time_point deadline) override;
  bool allows(std::int32_t token) override;
  const TokenMask& mask() override;  ///< Throws std::runtime_error if there is an `error`.
  void follow(std::int32_t token) override;
  std::optional<std::int32_t> take_forced() override;

  /// Changes nothing if it has not advanced past so many tokens. If the grammar itself cannot go back, there is an
  /// `error` then.
  void rollback(std::int64_t num_tokens) override;

  /// Tokens that must come next; see `take_forced`.
  const std::deque<std::int32_t>& forced() const { return forced_; }

  /// Returns how many of the tokens may come next, in this order, as far as that can be told without a mask: all of
  /// them while another thread writes it, or there is an `error`; a stop token may come anywhere, and is the last.
  std::size_t num_allowed(std::span<const std::int32_t> tokens);

  /// True if the text is complete, and nothing may follow.
  bool is_complete() const { return is_stopped_ && forced_.empty(); }

  bool has_ended() const override { return is_complete() || error_; }

  /// The reason why it cannot go on.
  const std::optional<std::string>& error() const { return error_; }

  /// Seconds that the next mask is likely to take.
  double mask_seconds() const { return matcher_.mask_seconds(); }

  /// Claims the mask for the caller to write. Returns false if it is written, or another thread writes it.
  bool begin_mask();
  void write_mask();  ///< Throws nothing: an `error` is thrown by `mask`.

 private:
  void force();
  void ask_mask();
  std::optional<std::size_t> ask(std::span<const std::int32_t> tokens);
  bool take(std::span<const std::int32_t> tokens);
  void fail();

  Matcher matcher_;
  std::unique_ptr<Matcher> asked_;  ///< copy at the same position that is asked about drafts
  std::size_t num_asked_ = 0;       ///< number of drafts that `asked_` was asked about
  std::int32_t vocab_size_;
  std::vector<std::int32_t> stop_token_ids_;
  std::vector<std::int32_t> ignored_;  ///< eos tokens that do not stop
  std::deque<std::int32_t> forced_;
  std::optional<std::string> error_;
  std::int64_t num_followed_ = 0;
  std::int64_t num_taken_ = 0;  ///< tokens that the matcher has taken since the grammar's beginning
  bool is_stopped_ = false;
  bool is_past_stop_ = false;          ///< the last token was a stop token, which the matcher has not taken
  std::atomic<bool> has_mask_{false};  ///< the mask is written, or being written; other threads read this
  TokenMask mask_;
};

}  // namespace quire
