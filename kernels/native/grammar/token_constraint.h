#pragma once

#include <bit>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "compute/abi.h"
#include "compute/waitable.h"

namespace quire {

class TokenMask;

/// Restricts the next token of a sequence, whatever else its request asked for.
class TokenConstraint {
 public:
  using Clock = std::chrono::steady_clock;

  virtual ~TokenConstraint() = default;

  /// Waits until the constraint can be asked. Returns false if another thread still writes its mask at the deadline.
  virtual bool wait_until(Clock::time_point deadline) = 0;

  virtual bool allows(std::int32_t token) = 0;

  /// The mask of all tokens. Writing it may take as long as hundreds of calls of `allows`.
  virtual const TokenMask& mask() = 0;

  /// Advances past a token that was sampled: from now on the constraint is about the token after it.
  virtual void follow(std::int32_t token) = 0;

  /// Advances past the next token if there is no choice, and returns it.
  virtual std::optional<std::int32_t> take_forced() { return std::nullopt; }

  /// True if no token may follow, or an error keeps the constraint from going on.
  virtual bool has_ended() const { return false; }

  /// Goes back by the last `num_tokens` that it has advanced past. Throws std::runtime_error if it cannot.
  virtual void rollback(std::int64_t num_tokens) = 0;
};

/// The tokens that a sequence may have next: a bit for each, the first token in the lowest bit of the first word. One
/// thread writes and publishes the mask while the model runs: from `reset` to `publish` the words are the writer's, at
/// other times no thread writes them.
class TokenMask final : public TokenConstraint {
 public:
  /// Bans all tokens. Throws std::invalid_argument unless there is at least one.
  explicit TokenMask(std::int32_t num_tokens);

  std::span<std::uint32_t> words() { return words_; }
  std::span<const std::uint32_t> words() const { return words_; }
  bool is_ready() const { return ready_.load() != 0; }
  void reset() { ready_.reset(0); }
  void publish() { ready_.store(1); }

  bool wait_until(Clock::time_point deadline) override;  ///< waits until the mask is published
  bool allows(std::int32_t token) override { return has(token); }
  const TokenMask& mask() override { return *this; }
  void follow(std::int32_t) override {}  ///< changes nothing: the mask allows the same tokens again
  void rollback(std::int64_t) override {}

  /// Allows or bans these tokens. Throws std::out_of_range for a token that has no bit.
  void set(std::span<const std::int32_t> tokens, bool allowed);
  void ban_all();
  bool has(std::int32_t token) const;
  bool allows_any() const;
  std::size_t num_allowed() const;

  /// Calls use(token) for each allowed token, in order.
  template <class Use>
  void for_each_allowed(Use use) const {
    for (std::size_t word = 0; word < words_.size(); ++word)
      for (std::uint32_t bits = words_[word]; bits != 0; bits &= bits - 1)
        use(static_cast<std::int32_t>(kBits * word + static_cast<std::size_t>(std::countr_zero(bits))));
  }

  /// Sets the logits of all other tokens to -inf, those beyond its bits included.
  void apply(std::span<float> logits) const;

 private:
  static constexpr std::size_t kBits = kMaskBits;

  std::vector<std::uint32_t> words_;
  Waitable ready_;
};

}  // namespace quire
