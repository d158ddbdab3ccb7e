#include "grammar/constraint.h"

#include <algorithm>
#include <exception>
#include <iterator>
#include <stdexcept>
#include <utility>

namespace quire {
namespace {

constexpr std::size_t kWordTokens = 32;   // tokens of a word of a mask
constexpr std::size_t kMostAsked = 4096;  // drafts that a copy of the matcher is asked about, before a new one is made

bool contains(const std::vector<std::int32_t>& token_ids, std::int32_t token) {
  return std::ranges::find(token_ids, token) != token_ids.end();
}

}  // namespace

Constraint::Constraint(const Matcher& grammar, std::int32_t vocab_size, std::vector<std::int32_t> stop_token_ids)
    : matcher_(grammar),
      vocab_size_(vocab_size),
      mask_(std::max(vocab_size, static_cast<std::int32_t>(kWordTokens * matcher_.mask_words()))) {
  stop_at(std::move(stop_token_ids));
  force();
}

void Constraint::stop_at(std::vector<std::int32_t> stop_token_ids) {
  stop_token_ids_ = std::move(stop_token_ids);
  ignored_.clear();
  std::ranges::copy_if(matcher_.vocabulary().eos_token_ids(), std::back_inserter(ignored_),
                       [&](std::int32_t token) { return !contains(stop_token_ids_, token); });
}

bool Constraint::restart() {
  const bool is_writing = has_mask_ && !mask_.is_ready();  // true while another thread writes the mask
  if (is_writing || error_ || !matcher_.reset()) return false;
  asked_.reset();
  num_taken_ = 0;
  forced_.clear();
  is_stopped_ = is_past_stop_ = has_mask_ = false;
  force();
  return !error_;
}

void Constraint::rollback(std::int64_t num_tokens) {
  if (num_tokens == 0) return;
  if (error_) throw std::runtime_error(*error_);
  if (has_mask_ && !mask_.is_ready())
    throw std::runtime_error("a constraint cannot go back while another thread writes its mask; wait for it first");
  const std::int64_t ahead = std::ssize(forced_) - is_past_stop_;  // tokens that the matcher is ahead by
  if (num_tokens < 0 || num_tokens > num_taken_ - ahead)
    throw std::runtime_error("a constraint cannot go back by " + std::to_string(num_tokens) +
                             " tokens; it has advanced past " + std::to_string(num_taken_ - ahead));
  asked_.reset();
  if (!matcher_.rollback(static_cast<std::size_t>(num_tokens + ahead))) {
    fail();
    throw std::runtime_error(*error_);
  }
  num_taken_ -= num_tokens + ahead;
  forced_.clear();
  is_stopped_ = is_past_stop_ = has_mask_ = false;
  force();
}

void Constraint::replay(std::span<const std::int32_t> tokens) {
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    if (has_ended() || !allows(tokens[i]))
      throw std::invalid_argument("the grammar does not allow token " + std::to_string(tokens[i]) + " at position " +
                                  std::to_string(i));
    follow(tokens[i]);
  }
}

bool Constraint::wait_until(Clock::time_point deadline) { return !has_mask_ || mask_.wait_until(deadline); }

bool Constraint::allows(std::int32_t token) {
  if (has_mask_) return mask_.has(token);
  if (!forced_.empty()) return token == forced_.front();
  if (contains(stop_token_ids_, token) && matcher_.is_accepting()) return true;
  // An eos token is the text's end, or stands in the grammar, or comes only if nothing else may.
  const bool is_eos = contains(matcher_.vocabulary().eos_token_ids(), token);
  return is_eos ? mask().has(token) : matcher_.allows(token);
}

std::size_t Constraint::num_allowed(std::span<const std::int32_t> tokens) {
  if ((has_mask_ && !mask_.is_ready()) || error_) return tokens.size();
  const std::size_t num_forced = std::min(forced_.size(), tokens.size());
  const auto end = forced_.begin() + static_cast<std::ptrdiff_t>(num_forced);
  const auto same =
      static_cast<std::size_t>(std::mismatch(forced_.begin(), end, tokens.begin()).first - forced_.begin());
  if (same < forced_.size() || same == tokens.size() || is_stopped_) return same;
  const auto free = tokens.subspan(same);
  const auto stop = std::ranges::find_if(free, [&](std::int32_t token) { return contains(stop_token_ids_, token); });
  const auto text = free.first(static_cast<std::size_t>(stop - free.begin()));
  const std::optional<std::size_t> allowed = text.empty() ? 0 : ask(text);
  if (!allowed) return tokens.size();
  return same + *allowed + (*allowed == text.size() && stop != free.end());
}

/// Returns how many of the tokens may come next; nothing if that cannot be told. The matcher keeps states of all it is
/// asked, up to a limit, and may fail. So that drafts change nothing, a copy of it is asked, and replaced now and then.
std::optional<std::size_t> Constraint::ask(std::span<const std::int32_t> tokens) {
  if (asked_ == nullptr || num_asked_ > kMostAsked) {
    asked_ = std::make_unique<Matcher>(matcher_);
    num_asked_ = 0;
  }
  num_asked_ += tokens.size();
  const std::size_t allowed = asked_->num_allowed(tokens);
  if (allowed == tokens.size() || !asked_->error()) return allowed;
  asked_.reset();
  return std::nullopt;
}

bool Constraint::take(std::span<const std::int32_t> tokens) {
  if (asked_ != nullptr && !asked_->take(tokens)) asked_.reset();
  return matcher_.take(tokens);
}

const TokenMask& Constraint::mask() {
  if (begin_mask()) write_mask();
  if (error_) throw std::runtime_error(*error_);
  return mask_;
}

void Constraint::follow(std::int32_t token) {
  has_mask_ = false;
  if (!forced_.empty()) return forced_.pop_front();
  ++num_followed_;
  if (contains(stop_token_ids_, token)) {
    is_stopped_ = is_past_stop_ = true;
  } else if (!take({&token, 1})) {
    fail();
  } else {
    ++num_taken_;
    is_stopped_ = matcher_.is_stopped();
    if (!is_stopped_) force();
  }
}

/// Advances the grammar past the tokens that must come next: it allows just one way to write them.
void Constraint::force() {
  std::vector<std::int32_t> next = matcher_.forced();
  next.erase(std::ranges::find_if(next, [&](std::int32_t id) { return id >= vocab_size_; }), next.end());
  if (next.empty()) {
    if (matcher_.is_cancelled()) fail();
    return;
  }
  if (!take(next)) return fail();
  forced_.assign(next.begin(), next.end());
  num_taken_ += std::ssize(next);
  num_followed_ += std::ssize(next);
  is_stopped_ = matcher_.is_stopped();
}

void Constraint::fail() {
  std::string words = matcher_.error().value_or("llguidance gives no reason");
  if (words.starts_with("NoExtension")) words = "none of the model's tokens may come next";
  error_ = "the grammar can't be followed any further: " + words;
}

std::optional<std::int32_t> Constraint::take_forced() {
  if (forced_.empty()) return std::nullopt;
  const std::int32_t token = forced_.front();
  forced_.pop_front();
  return token;
}

bool Constraint::begin_mask() {
  if (has_mask_) return false;
  has_mask_ = true;
  mask_.reset();
  return true;
}

void Constraint::write_mask() {
  try {
    mask_.ban_all();
    if (forced_.empty())
      ask_mask();
    else
      mask_.set({&forced_.front(), 1}, true);
  } catch (const std::exception& error) {
    error_ = error.what();
  }
  mask_.publish();
}

void Constraint::ask_mask() {
  if (!matcher_.write_mask(mask_.words())) return fail();
  if (matcher_.is_accepting()) mask_.set(stop_token_ids_, true);
  if (ignored_.empty()) return;
  mask_.set(ignored_, false);
  if (!mask_.allows_any()) mask_.set(ignored_, true);
}

}  // namespace quire
