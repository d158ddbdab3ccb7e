#include "grammar/llguidance.h"

#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <stdexcept>
#include <utility>

namespace quire {
namespace {

// Not the thread's CPU time: that takes a system call, and where all CPUs are busy one in ten of them takes 0.2 ms.
using Clock = std::chrono::steady_clock;

// As in parser/llguidance.h of llguidance 1.9. Later versions of 1 may only append to these.

using LlgTokenize = std::size_t (*)(const void* context, const std::uint8_t* text, std::size_t size,
                                    std::uint32_t* token_ids, std::size_t capacity);

struct LlgTokenizerInitV2 {
  std::size_t struct_size = sizeof(LlgTokenizerInitV2);
  std::uint32_t vocab_size = 0;
  std::uint32_t tok_eos = 0;
  const std::uint32_t* token_lens = nullptr;
  const std::uint8_t* token_bytes = nullptr;
  const char* tokenizer_json = nullptr;
  bool tokenize_assumes_string = false;
  LlgTokenize tokenize_fn = nullptr;
  bool use_approximate_greedy_tokenize_fn = false;
  const void* tokenize_user_data = nullptr;
  const char* const* slices = nullptr;
  const std::uint32_t* tok_eos_extra = nullptr;
  std::uint32_t tok_eos_extra_count = 0;
};

struct LlgParserLimits {
  std::size_t max_items_in_row = 0;
  std::uint64_t initial_lexer_fuel = 0;
  std::uint64_t step_lexer_fuel = 0;
  std::size_t step_max_items = 0;
  std::size_t max_lexer_states = 0;
  std::size_t max_grammar_size = 0;
  bool precompute_large_lexemes = false;
  bool verbose_errors = false;
};

struct LlgConstraintInit {
  const LlgTokenizer* tokenizer = nullptr;
  std::uint32_t log_buffer_level = 0;
  std::uint32_t log_stderr_level = 0;
  bool ff_tokens_ok = false;
  bool backtrack_ok = false;
  LlgParserLimits limits;
  std::array<std::byte, 256> appended{};  ///< room for fields that later versions append
};

constexpr std::size_t kMaxCached = 4096;      // texts whose tokens are cached
constexpr std::size_t kMaxCachedText = 1024;  // bytes of a cached text, at most
constexpr double kDecay = 0.7;                // a mask lowers the estimated time of masks to this share of it at least
constexpr std::size_t kMaxForced = 4096;      // tokens that are returned at once
constexpr std::size_t kMaxText = 1 << 15;     // bytes of a forced text
constexpr std::size_t kMaxError = 500;        // bytes of a message

const std::uint32_t* unsigned_ids(std::span<const std::int32_t> token_ids) {
  return reinterpret_cast<const std::uint32_t*>(token_ids.data());
}

/// Removes the marker for llguidance's developers, and cuts a long message between characters of UTF-8.
std::string shorten(std::string words) {
  constexpr std::string_view kMark = "<non-verbose/>";
  if (const std::size_t mark = words.find(kMark); mark != std::string::npos) words.erase(mark, kMark.size());
  if (words.size() > kMaxError) {
    std::size_t end = kMaxError;
    while (end > 0 && (static_cast<unsigned char>(words[end]) & 0xC0) == 0x80) --end;
    words.resize(end);
  }
  const std::size_t first = words.find_first_not_of(" \n"), last = words.find_last_not_of(" \n");
  return first == std::string::npos ? std::string() : words.substr(first, last + 1 - first);
}

void reject_nul(const std::string& text, const char* what) {
  if (text.find('\0') != std::string::npos)
    throw std::invalid_argument(std::string(what) + " has a NUL character; write it as an escape");
}

}  // namespace

/// A function of the library, as whatever type it is used.
struct Symbol {
  void* address;
  template <class Function>
  operator Function*() const {
    return reinterpret_cast<Function*>(address);
  }
};

/// The functions of the library, by their names without "llg_".
class LlguidanceLibrary {
  std::unique_ptr<void, int (*)(void*)> handle_;

  Symbol find(const char* name) const {
    if (handle_ == nullptr) throw std::runtime_error("llguidance cannot be loaded: " + std::string(dlerror()));
    void* address = dlsym(handle_.get(), name);
    if (address == nullptr)
      throw std::runtime_error(std::string("this llguidance has no function ") + name +
                               "; install llguidance 1.9.1 or a later 1.x");
    return {address};
  }

 public:
  explicit LlguidanceLibrary(const std::string& file)
      : handle_(dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL), &dlclose) {}

  LlgTokenizer* (*new_tokenizer)(const LlgTokenizerInitV2*, char* error,
                                 std::size_t size) = find("llg_new_tokenizer_v2");
  void (*free_tokenizer)(LlgTokenizer*) = find("llg_free_tokenizer");
  void (*set_defaults)(LlgConstraintInit*, const LlgTokenizer*) = find("llg_constraint_init_set_defaults");
  LlgMatcher* (*new_matcher)(const LlgConstraintInit*, const char* kind, const char* grammar) = find("llg_new_matcher");
  LlgMatcher* (*clone_matcher)(const LlgMatcher*) = find("llg_clone_matcher");
  void (*free_matcher)(LlgMatcher*) = find("llg_free_matcher");
  const char* (*get_error)(LlgMatcher*) = find("llg_matcher_get_error");
  LlgCancellationHandle* (*get_cancellation_handle)(const LlgMatcher*) = find("llg_matcher_get_cancellation_handle");
  void (*free_cancellation_handle)(LlgCancellationHandle*) = find("llg_free_cancellation_handle");
  void (*cancel)(LlgCancellationHandle*) = find("llg_cancel");
  bool (*is_cancelled)(const LlgMatcher*) = find("llg_matcher_is_cancelled");
  std::int32_t (*validate_tokens)(LlgMatcher*, const std::uint32_t* token_ids,
                                  std::size_t count) = find("llg_matcher_validate_tokens");
  std::int32_t (*consume_tokens)(LlgMatcher*, const std::uint32_t* token_ids,
                                 std::size_t count) = find("llg_matcher_consume_tokens");
  std::int32_t (*rollback)(LlgMatcher*, std::size_t num_tokens) = find("llg_matcher_rollback");
  std::int32_t (*reset)(LlgMatcher*) = find("llg_matcher_reset");
  bool (*is_accepting)(LlgMatcher*) = find("llg_matcher_is_accepting");
  bool (*is_stopped)(const LlgMatcher*) = find("llg_matcher_is_stopped");
  std::int32_t (*compute_ff_tokens)(LlgMatcher*, std::uint32_t* token_ids,
                                    std::size_t capacity) = find("llg_matcher_compute_ff_tokens");
  std::size_t (*get_mask_byte_size)(const LlgMatcher*) = find("llg_matcher_get_mask_byte_size");
  std::int32_t (*compute_mask_into)(LlgMatcher*, std::uint32_t* words,
                                    std::size_t bytes) = find("llg_matcher_compute_mask_into");
};

Vocabulary::Vocabulary(const std::string& library, std::span<const std::string> texts,
                       std::vector<std::int32_t> eos_token_ids, Tokenize tokenize_text)
    : library_(std::make_shared<const LlguidanceLibrary>(library)),
      num_tokens_(static_cast<std::int32_t>(texts.size())),
      eos_token_ids_(std::move(eos_token_ids)),
      tokenize_(std::move(tokenize_text)),
      tokenizer_(nullptr, library_->free_tokenizer),
      limits_(library_->cancel) {
  if (texts.empty() || eos_token_ids_.empty())
    throw std::invalid_argument("a vocabulary of " + std::to_string(texts.size()) + " tokens, of which " +
                                std::to_string(eos_token_ids_.size()) + " end the text; both must be at least 1");
  std::vector<std::uint32_t> sizes;
  std::string bytes;
  for (const std::string& text : texts) {
    sizes.push_back(static_cast<std::uint32_t>(text.size()));
    bytes += text;
  }
  const std::uint32_t* eos = unsigned_ids(eos_token_ids_);
  LlgTokenizerInitV2 init;
  init.vocab_size = static_cast<std::uint32_t>(texts.size());
  init.tok_eos = *eos;
  init.tok_eos_extra = eos + 1;
  init.tok_eos_extra_count = static_cast<std::uint32_t>(eos_token_ids_.size() - 1);
  init.token_lens = sizes.data();
  init.token_bytes = reinterpret_cast<const std::uint8_t*>(bytes.data());
  init.tokenize_fn = &tokenize_for;
  init.tokenize_user_data = this;
  std::array<char, kMaxError> error{};
  tokenizer_.reset(library_->new_tokenizer(&init, error.data(), error.size()));
  if (tokenizer_ == nullptr) throw std::invalid_argument(error.data());
}

/// Tokenizes a forced text, which llguidance has read to its end by then. The first call may load the tokenizer, which
/// does not count as time of llguidance.
std::size_t Vocabulary::tokenize_for(const void* context, const std::uint8_t* text, std::size_t size,
                                     std::uint32_t* token_ids, std::size_t capacity) noexcept {
  const Vocabulary& vocabulary = *static_cast<const Vocabulary*>(context);
  if (size > kMaxText) {
    vocabulary.limits_.cancel();
    return 0;
  }
  vocabulary.limits_.end();
  const Tokens found = vocabulary.tokenize({reinterpret_cast<const char*>(text), size});
  std::copy_n(found.begin(), std::min(found.size(), capacity), token_ids);
  return found.size();
}

Vocabulary::Tokens Vocabulary::tokenize(std::string_view text) const noexcept {
  std::string key(text);
  {
    const std::lock_guard lock(kept_mutex_);
    if (const auto kept = kept_.find(key); kept != kept_.end()) return kept->second;
  }
  Tokens found = tokenize_(text);
  if (!found.empty() && key.size() <= kMaxCachedText) {
    const std::lock_guard lock(kept_mutex_);
    if (kept_.size() >= kMaxCached) kept_.clear();
    kept_.emplace(std::move(key), found);
  }
  return found;
}

void Matcher::Free::operator()(LlgMatcher* matcher) const { library->free_matcher(matcher); }

void Matcher::Free::operator()(LlgCancellationHandle* handle) const { library->free_cancellation_handle(handle); }

std::unique_ptr<LlgCancellationHandle, Matcher::Free> Matcher::cancellation_handle() const {
  return {vocabulary_->library_->get_cancellation_handle(matcher_.get()), Free{vocabulary_->library_}};
}

Matcher::Matcher(std::shared_ptr<const Vocabulary> vocabulary, const std::string& kind, const std::string& grammar)
    : vocabulary_(std::move(vocabulary)),
      matcher_(nullptr, Free{vocabulary_->library_}),
      cancellation_(nullptr, Free{vocabulary_->library_}) {
  reject_nul(grammar, "the grammar");
  vocabulary_->limits_.start();
  LlgConstraintInit init;
  vocabulary_->library_->set_defaults(&init, vocabulary_->tokenizer_.get());
  init.log_stderr_level = 0;
  init.limits.verbose_errors = false;
  matcher_.reset(vocabulary_->library_->new_matcher(&init, kind.c_str(), grammar.c_str()));
  cancellation_ = cancellation_handle();
}

Matcher::Matcher(const Matcher& other)
    : vocabulary_(other.vocabulary_),
      matcher_(vocabulary_->library_->clone_matcher(other.matcher_.get()), Free{vocabulary_->library_}),
      cancellation_(cancellation_handle()) {}

std::optional<std::string> Matcher::error() {
  if (is_cancelled()) return "the only text that may come next is too long, or has no end";
  const char* words = vocabulary_->library_->get_error(matcher_.get());
  return words == nullptr ? std::nullopt : std::optional(shorten(words));
}

bool Matcher::is_cancelled() const { return vocabulary_->library_->is_cancelled(matcher_.get()); }

bool Matcher::allows_any() {
  forced();  // the mask would compute these tokens without a limit
  if (is_cancelled()) return false;
  std::vector<std::uint32_t> words(mask_words());
  return write_mask(words);
}

bool Matcher::allows(std::int32_t token) { return num_allowed({&token, 1}) == 1; }

std::size_t Matcher::num_allowed(std::span<const std::int32_t> token_ids) {
  const auto is_unknown = [&](std::int32_t token) { return token < 0 || token >= vocabulary_->num_tokens(); };
  const auto known =
      token_ids.first(static_cast<std::size_t>(std::ranges::find_if(token_ids, is_unknown) - token_ids.begin()));
  const std::int32_t count = vocabulary_->library_->validate_tokens(matcher_.get(), unsigned_ids(known), known.size());
  return static_cast<std::size_t>(std::max(count, 0));
}

bool Matcher::take(std::span<const std::int32_t> token_ids) {
  for (const std::int32_t token : token_ids)
    if (token < 0 || token >= vocabulary_->num_tokens()) return false;
  return vocabulary_->library_->consume_tokens(matcher_.get(), unsigned_ids(token_ids), token_ids.size()) == 0;
}

bool Matcher::rollback(std::size_t num_tokens) {
  return vocabulary_->library_->rollback(matcher_.get(), num_tokens) == 0;
}

bool Matcher::reset() { return vocabulary_->library_->reset(matcher_.get()) == 0; }

bool Matcher::is_accepting() { return vocabulary_->library_->is_accepting(matcher_.get()); }

bool Matcher::is_stopped() const { return vocabulary_->library_->is_stopped(matcher_.get()); }

std::vector<std::int32_t> Matcher::forced() {
  std::array<std::uint32_t, kMaxForced> ids;
  vocabulary_->limits_.begin(cancellation_.get());
  const std::int32_t count = vocabulary_->library_->compute_ff_tokens(matcher_.get(), ids.data(), ids.size());
  vocabulary_->limits_.end();
  return {ids.begin(), ids.begin() + std::max(count, 0)};
}

std::size_t Matcher::mask_words() const {
  return vocabulary_->library_->get_mask_byte_size(matcher_.get()) / sizeof(std::uint32_t);
}

bool Matcher::write_mask(std::span<std::uint32_t> words) {
  const auto begun = Clock::now();
  const std::size_t bytes = sizeof(std::uint32_t) * mask_words();
  const bool is_written = vocabulary_->library_->compute_mask_into(matcher_.get(), words.data(), bytes) == 0;
  const double seconds = std::chrono::duration<double>(Clock::now() - begun).count();
  // The shorter of two: a thread is interrupted now and then, which says nothing about masks.
  mask_seconds_ = std::max(std::min(seconds, last_seconds_), kDecay * mask_seconds());
  last_seconds_ = seconds;
  return is_written;
}

}  // namespace quire
