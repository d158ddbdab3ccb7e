#include "grammar/token_constraint.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>

namespace quire {
namespace {

constexpr float kBanned = -std::numeric_limits<float>::infinity();

}  // namespace

TokenMask::TokenMask(std::int32_t num_tokens) {
  if (num_tokens < 1)
    throw std::invalid_argument("num_tokens=" + std::to_string(num_tokens) + " of a mask; it must be at least 1");
  words_.resize((static_cast<std::size_t>(num_tokens) + kBits - 1) / kBits);
}

bool TokenMask::wait_until(Clock::time_point deadline) {
  while (!is_ready()) {
    const auto left = deadline - Clock::now();
    if (left <= Clock::duration::zero()) return false;
    ready_.sleep_while(0, left);
  }
  return true;
}

void TokenMask::set(std::span<const std::int32_t> tokens, bool allowed) {
  for (const std::int32_t token : tokens) {
    std::uint32_t& word = words_.at(static_cast<std::size_t>(token) / kBits);
    const std::uint32_t bit = std::uint32_t{1} << (static_cast<std::size_t>(token) % kBits);
    word = allowed ? word | bit : word & ~bit;
  }
}

void TokenMask::ban_all() { std::ranges::fill(words_, 0); }

bool TokenMask::has(std::int32_t token) const {
  const std::size_t word = static_cast<std::size_t>(token) / kBits;
  return word < words_.size() && (words_[word] >> (static_cast<std::size_t>(token) % kBits) & 1);
}

bool TokenMask::allows_any() const {
  return std::ranges::any_of(words_, [](std::uint32_t word) { return word != 0; });
}

std::size_t TokenMask::num_allowed() const {
  std::size_t count = 0;
  for (const std::uint32_t word : words_) count += static_cast<std::size_t>(std::popcount(word));
  return count;
}

void TokenMask::apply(std::span<float> logits) const {
  for (std::size_t begin = 0; begin < logits.size(); begin += kBits) {
    const std::uint32_t word = begin / kBits < words_.size() ? words_[begin / kBits] : 0;
    if (word == ~std::uint32_t{0}) continue;
    const std::size_t count = std::min(kBits, logits.size() - begin);
    for (std::size_t i = 0; i < count; ++i) logits[begin + i] = word >> i & 1 ? logits[begin + i] : kBanned;
  }
}

}  // namespace quire
