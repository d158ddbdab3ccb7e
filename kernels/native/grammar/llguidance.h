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

struct LlgMatcher;    // llguidance's own
struct LlgTokenizer;  // llguidance's own

/// Grammars, by the C interface of llguidance (parser/llguidance.h there). The shared library of its Python package
/// exports it, so that the threads of a step can ask grammars at the same time, and without the interpreter.
namespace quire {

struct LlguidanceLibrary;

/// What each token writes, and how text is tokenized. Any thread may use it.
class Vocabulary {
 public:
  using Tokens = std::vector<std::uint32_t>;

  /// The tokens of a text that a grammar demands; none if they can't be told. It is called on any thread, and throws
  /// nothing.
  using Tokenize = std::function<Tokens(std::string_view text)>;

  /// `library`: the file of llguidance's shared library. `texts`: what each token writes, after a byte 255 if it is a
  /// special one. Throws std::runtime_error where the library is of no use, std::invalid_argument for the others.
  Vocabulary(const std::string& library, std::span<const std::string> texts, std::vector<std::int32_t> eos_token_ids,
             Tokenize tokenize);
  Vocabulary(const Vocabulary&) = delete;  // llguidance has its address
  Vocabulary& operator=(const Vocabulary&) = delete;

  std::int32_t num_tokens() const { return num_tokens_; }
  const std::vector<std::int32_t>& eos_token_ids() const { return eos_token_ids_; }

  /// By `tokenize`; texts come again, as the names in a schema do, and are kept.
  Tokens tokenize(std::string_view text) const noexcept;

 private:
  friend class Matcher;

  std::shared_ptr<const LlguidanceLibrary> library_;
  std::int32_t num_tokens_;
  std::vector<std::int32_t> eos_token_ids_;
  Tokenize tokenize_;
  mutable std::mutex kept_mutex_;
  mutable std::unordered_map<std::string, Tokens> kept_;
  std::unique_ptr<LlgTokenizer, void (*)(LlgTokenizer*)> tokenizer_;
};

/// A place in a grammar. A copy goes its own way.
class Matcher {
 public:
  /// The beginning of a grammar. `kind` is "lark", or "llguidance" for JSON that llguidance's own functions have made.
  /// If the grammar is of no use there is an `error`. Throws std::invalid_argument for text that has a NUL.
  Matcher(std::shared_ptr<const Vocabulary> vocabulary, const std::string& kind, const std::string& grammar);
  Matcher(const Matcher& other);
  Matcher& operator=(const Matcher&) = delete;

  const Vocabulary& vocabulary() const { return *vocabulary_; }

  /// Why it can't go on, in llguidance's words: 500 bytes at most.
  std::optional<std::string> error();

  /// Whether there is any text that it allows. Copies have the work done that this takes.
  bool allows_any();

  /// Whether the token may come next: one that writes what the grammar allows, or eos where the text may end.
  bool allows(std::int32_t token);

  /// Goes on by tokens that may come; false, and then there is an `error`, if they may not.
  bool take(std::span<const std::int32_t> token_ids);

  /// Goes back by the last `num_tokens` taken; false, and then there is an `error`, if it can't.
  bool rollback(std::size_t num_tokens);

  /// Goes back to the beginning; false if it can't. What has been found out about the grammar stays known.
  bool reset();

  /// Whether the text may end here.
  bool is_accepting();

  /// Whether nothing more may come.
  bool is_stopped() const;

  /// The tokens that must come next.
  std::vector<std::int32_t> forced();

  /// How many words a mask has.
  std::size_t mask_words() const;

  /// A bit for each token of the vocabulary that may come; false if there is an `error`. There must be enough words.
  bool write_mask(std::span<std::uint32_t> words);

  /// What the next mask is likely to take.
  double mask_seconds() const { return mask_seconds_.load(std::memory_order_relaxed); }

 private:
  struct Free {
    std::shared_ptr<const LlguidanceLibrary> library;
    void operator()(LlgMatcher* matcher) const;
  };

  std::shared_ptr<const Vocabulary> vocabulary_;
  std::unique_ptr<LlgMatcher, Free> matcher_;
  double last_seconds_ = std::numeric_limits<double>::infinity();  ///< that a mask took
  std::atomic<double> mask_seconds_{0};                            ///< also read while another thread writes a mask
};

}  // namespace quire
