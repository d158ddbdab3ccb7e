#pragma once

#include <chrono>
#include <cstdint>
#include <optional>

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

}  // namespace quire
