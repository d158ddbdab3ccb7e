#pragma once

#include <chrono>
#include <cstdint>

namespace quire {

class TokenMask;

/// What a sequence may draw next, whatever else was asked for.
class TokenRule {
 public:
  using Clock = std::chrono::steady_clock;

  virtual ~TokenRule() = default;

  /// Whether the rule can be asked by then: another thread may be writing its mask.
  virtual bool wait_until(Clock::time_point deadline) = 0;

  virtual bool allows(std::int32_t token) = 0;

  /// Of all tokens; to write it may take as long as hundreds of calls of `allows`.
  virtual const TokenMask& mask() = 0;

  /// The token has been drawn: from now on the rule is about the next one.
  virtual void follow(std::int32_t token) = 0;
};

}  // namespace quire
