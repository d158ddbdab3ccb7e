#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "grammar/call_limits.h"

struct LlgMatcher;    // llguidance's own
struct LlgTokenizer;  // llguidance's own

/// Grammars, through the C interface of llguidance (its parser/llguidance.h). The shared library of its Python package
/// exports it, so the threads of a step can ask grammars at the same time, and without the interpreter.
namespace quire {

class LlguidanceLibrary;

/// The text of each token, and a tokenizer. Any thread may use it.
class Vocabulary {
 public:
  using Tokens = std::vector<std::uint32_t>;

  /// Returns the tokens of a text that a grammar demands; none if they are not known. Called on any thread; throws
  /// nothing.
  using Tokenize = std::function<Tokens(std::string_view text)>;

  /// `library`: the file of llguidance's shared library. `texts`: the text of each token, after a byte 255 if it is a
  /// special one. Throws std::runtime_error if the library cannot be used, std::invalid_argument for the rest.
  Vocabulary(const std::string& library, std::span<const std::string> texts, std::vector<std::int32_t> eos_token_ids,
             Tokenize tokenize);
  Vocabulary(const Vocabulary&) = delete;  // llguidance has its address
  Vocabulary& operator=(const Vocabulary&) = delete;

  std::int32_t num_tokens() const { return num_tokens_; }
  const std::vector<std::int32_t>& eos_token_ids() const { return eos_token_ids_; }

  /// Calls `tokenize`, and caches the result: texts recur, as the names in a schema do.
  Tokens tokenize(std::string_view text) const noexcept;

 private:
  friend class Matcher;

  static std::size_t tokenize_for(const void* context, const std::uint8_t* text, std::size_t size,
                                  std::uint32_t* token_ids, std::size_t capacity) noexcept;

  std::shared_ptr<const LlguidanceLibrary> library_;
  std::int32_t num_tokens_;
  std::vector<std::int32_t> eos_token_ids_;
  Tokenize tokenize_;
  mutable std::mutex kept_mutex_;
  mutable std::unordered_map<std::string, Tokens> kept_;
  std::unique_ptr<LlgTokenizer, void (*)(LlgTokenizer*)> tokenizer_;
  mutable CallLimits limits_;
};

/// A position in a grammar. A copy advances independently.
class Matcher {
 public:
  /// Starts at the beginning of a grammar. `kind` is "lark", or "llguidance" for JSON that llguidance's own functions
  /// have made. An invalid grammar leaves an `error`. Throws std::invalid_argument for text that has a NUL.
  Matcher(std::shared_ptr<const Vocabulary> vocabulary, const std::string& kind, const std::string& grammar);
  Matcher(const Matcher& other);
  Matcher& operator=(const Matcher&) = delete;

  const Vocabulary& vocabulary() const { return *vocabulary_; }

  /// The reason why it cannot go on, in llguidance's words: at most 500 bytes.
  std::optional<std::string> error();

  /// Returns true if it cannot go on because the text that must come next takes too long to compute.
  bool is_cancelled() const;

  /// Returns true if it allows any text. Copies made later benefit from the work that this takes.
  bool allows_any();

  /// Returns true if the token may come next: one whose text the grammar allows, or eos where the text may end.
  bool allows(std::int32_t token);

  /// Returns how many of the tokens may come next, in this order.
  std::size_t num_allowed(std::span<const std::int32_t> token_ids);

  /// Advances past tokens. Returns false if they may not come; then there is an `error`.
  bool take(std::span<const std::int32_t> token_ids);

  /// Goes back by the last `num_tokens` tokens. Returns false if it cannot; then there is an `error`.
  bool rollback(std::size_t num_tokens);

  /// Goes back to the beginning, and keeps what it has learned about the grammar. Returns false if it cannot.
  bool reset();

  /// Returns true if the text may end here.
  bool is_accepting();

  /// Returns true if nothing may follow.
  bool is_stopped() const;

  /// Returns the tokens that must come next. There is an `error` afterwards if computing them takes too long.
  std::vector<std::int32_t> forced();

  /// Number of words of a mask.
  std::size_t mask_words() const;

  /// Sets the bit of each token that may come next. Returns false if there is an `error`. `words` must be large enough.
  bool write_mask(std::span<std::uint32_t> words);

  /// Seconds that the next mask is likely to take.
  double mask_seconds() const { return mask_seconds_.load(std::memory_order_relaxed); }

 private:
  struct Free {
    std::shared_ptr<const LlguidanceLibrary> library;
    void operator()(LlgMatcher* matcher) const;
    void operator()(LlgCancellationHandle* handle) const;
  };

  std::unique_ptr<LlgCancellationHandle, Free> cancellation_handle() const;

  std::shared_ptr<const Vocabulary> vocabulary_;
  std::unique_ptr<LlgMatcher, Free> matcher_;
  std::unique_ptr<LlgCancellationHandle, Free> cancellation_;      ///< declared after the matcher, to which it belongs
  double last_seconds_ = std::numeric_limits<double>::infinity();  ///< seconds that the last mask took
  std::atomic<double> mask_seconds_{0};                            ///< estimate; also read while others write masks
};

}  // namespace quire
