#include "kv_cache/sequences.h"

#include <algorithm>
#include <iterator>
#include <ranges>
#include <stdexcept>

namespace quire {
namespace {

constexpr std::int64_t kMostPositions = std::int64_t{1} << 48;

void check_tokens(std::span<const std::int32_t> tokens, std::int32_t vocab_size) {
  for (const std::int32_t token : tokens)
    if (token < 0 || token >= vocab_size)
      throw std::invalid_argument("token id " + std::to_string(token) + " is not in [0, " + std::to_string(vocab_size) +
                                  ")");
}

void check_positions(std::int32_t slot, std::int64_t num_tokens) {
  if (num_tokens < 0 || num_tokens > kMostPositions)
    throw std::invalid_argument("pages for " + std::to_string(num_tokens) + " tokens of slot " + std::to_string(slot) +
                                "; give 0 to " + std::to_string(kMostPositions));
}

}  // namespace

Sequences::Sequences(std::int32_t num_pages, std::int32_t block_size, std::int32_t vocab_size, std::int32_t extent,
                     PageLedger* ledger, const StateShape& state, StateLedger* state_ledger,
                     const StateMemory& state_memory)
    : pages_(num_pages, extent),
      states_(state.record_bytes == 0 ? nullptr
                                      : std::make_unique<StateStore>(state, num_pages, state_ledger, state_memory)),
      tree_(pages_, block_size, ledger, states_.get()),
      block_size_(block_size),
      vocab_size_(vocab_size) {
  if (states_) states_->take_over();
}

Sequences::~Sequences() {
  for (std::size_t slot = 0; slot < slots_.size(); slot++)
    if (slots_[slot]) close(static_cast<std::int32_t>(slot));
}

std::int32_t Sequences::open(std::vector<std::int32_t> tokens, std::int64_t num_prompt_tokens, SamplingConfig sampling,
                             const std::optional<std::string>& cache_salt, const std::optional<PoolingConfig>& pooling,
                             std::shared_ptr<TokenConstraint> constraint, std::int64_t segment) {
  if (tokens.empty()) throw std::invalid_argument("a sequence needs at least one token");
  check_tokens(tokens, vocab_size_);
  SamplingState state(std::move(sampling), tokens, num_prompt_tokens, vocab_size_);
  const std::int64_t num_tokens = std::ssize(tokens);
  if (segment < 0 || segment > num_tokens)
    throw std::invalid_argument("segment=" + std::to_string(segment) + " is not among the positions of " +
                                std::to_string(num_tokens) + " tokens");
  auto sequence = std::make_unique<Sequence>(Sequence{std::move(tokens),
                                                      num_prompt_tokens,
                                                      1,
                                                      {},
                                                      RadixTree::kNone,
                                                      0,
                                                      0,
                                                      std::move(state),
                                                      {},
                                                      std::move(constraint),
                                                      num_tokens,
                                                      segment,
                                                      cache_salt,
                                                      num_opened_++,
                                                      nullptr});
  if (states_)
    sequence->states =
        std::make_unique<SequenceStates>(*states_, block_size_, num_prompt_tokens, cache_salt.has_value());
  if (pooling) sequence->pooling.emplace(*pooling, num_tokens);
  if (cache_salt) sequence->root = tree_.enter(*cache_salt);
  if (free_.empty()) {
    slots_.push_back(std::move(sequence));
    return static_cast<std::int32_t>(slots_.size() - 1);
  }
  const std::int32_t slot = free_.back();
  free_.pop_back();
  slots_[slot] = std::move(sequence);
  return slot;
}

Sequences::Match Sequences::match(std::int32_t slot) {
  found_.clear();
  find(at(slot));
  Match match;
  for (std::int32_t page : found_) match.cached_pages += tree_.cached(page);
  match.tokens = static_cast<std::int64_t>(found_.size()) * block_size_;
  if (!found_.empty()) match.end = found_.back();
  return match;
}

/// Returns the tokens that need not be computed if the prefix cache holds them.
std::span<const std::int32_t> Sequences::findable(const Sequence& sequence) const {
  auto known = static_cast<std::int64_t>(sequence.tokens.size()) - 1;
  if (sequence.sampling.config().prompt_logprobs)  // the logits before the next one to report are needed
    known = std::min(known, sequence.prompt_logprobs_done - 1);
  if (sequence.pooling) known = std::min(known, sequence.pooling->next());
  return std::span(sequence.tokens).first(static_cast<std::size_t>(known));
}

/// Appends the pages of the sequence's prefix match to `found_`. Returns how many there are without regard to state.
std::int64_t Sequences::find(const Sequence& sequence) {
  if (sequence.root != RadixTree::kNone) tree_.match(sequence.root, findable(sequence), found_);
  const std::int64_t count = std::ssize(found_);
  while (states_ && !found_.empty() && states_->snapshot(found_.back()) == StateStore::kNone) found_.pop_back();
  return count;
}

std::vector<PrefixKey> Sequences::keys(std::int32_t slot) {
  const Sequence& sequence = at(slot);
  if (sequence.root == RadixTree::kNone) return {};
  return tree_.keys(sequence.root, findable(sequence));
}

std::vector<PrefixKey> Sequences::state_keys(const PrefixKey& prefix, std::int32_t most) const {
  std::vector<PrefixKey> keys;
  const std::int32_t pieces = states_ ? states_->shape().num_pieces() : 0;
  for (std::int32_t piece = 0; piece < std::min(pieces, most); piece++) keys.push_back(state_key(prefix, piece));
  return keys;
}

std::vector<std::int32_t> Sequences::state_pages(std::int32_t slot) const {
  const Sequence& sequence = at(slot);
  const std::int32_t record = states_ ? sequence.states->record() : StateStore::kNone;
  std::vector<std::int32_t> pages;
  const std::int32_t pieces = record == StateStore::kNone ? 0 : states_->shape().num_pieces();
  for (std::int32_t piece = 0; piece < pieces; piece++) pages.push_back(pages_.total() + record * pieces + piece);
  return pages;
}

void Sequences::share_filled(std::int32_t slot, std::int64_t num_tokens, std::span<const std::uint64_t> contents) {
  Sequence& sequence = at(slot);
  if (!states_ || num_tokens < block_size_ || num_tokens % block_size_ != 0)
    throw std::invalid_argument("num_tokens=" + std::to_string(num_tokens) + " of slot " + std::to_string(slot) +
                                "; it must be whole pages, of a model with state");
  sequence.states->fill(num_tokens);
  share(slot, num_tokens, contents);
  sequence.states->leave(sequence.pages[static_cast<std::size_t>(num_tokens / block_size_ - 1)]);
}

std::optional<std::int64_t> Sequences::start(std::int32_t slot, std::int64_t num_tokens) {
  Sequence& sequence = at(slot);
  if (!sequence.pages.empty())
    throw std::logic_error("slot " + std::to_string(slot) + " has pages already; it cannot be started again");
  check_positions(slot, num_tokens);
  found_.clear();
  const std::int64_t branch = find(sequence);
  for (std::int32_t page : found_) tree_.retain(page);
  sequence.pages = found_;
  sequence.shared = static_cast<std::int64_t>(found_.size());
  if (states_) {
    begin_at_snapshot(sequence, sequence.pages);
    sequence.states->set_branch(branch * block_size_);
  }
  if (!reserve(slot, num_tokens)) {
    release_pages(slot);
    return std::nullopt;
  }
  tree_.count_match(std::span(sequence.pages).first(static_cast<std::size_t>(sequence.shared)));
  return sequence.num_computed = sequence.shared * block_size_;
}

std::int64_t Sequences::hold_match(std::int32_t slot) {
  Sequence& sequence = at(slot);
  if (sequence.shared != std::ssize(sequence.pages))
    throw std::logic_error("slot " + std::to_string(slot) + " has pages of its own; it cannot hold a prefix match");
  found_.clear();
  find(sequence);  // begins with the pages that it has: they are held, and the tree has one page for the same tokens
  for (std::size_t i = sequence.pages.size(); i < found_.size(); i++) {
    tree_.retain(found_[i]);
    sequence.pages.push_back(found_[i]);
  }
  sequence.shared = std::ssize(sequence.pages);
  if (states_) begin_at_snapshot(sequence, sequence.pages);
  return sequence.num_computed = sequence.shared * block_size_;
}

bool Sequences::fork(std::int32_t slot, std::int32_t source, std::int64_t num_computed, std::int64_t num_tokens) {
  Sequence &child = at(slot), &parent = at(source);
  if (!child.pages.empty())
    throw std::logic_error("slot " + std::to_string(slot) + " has pages already; it cannot fork");
  check_positions(slot, num_tokens);
  const auto count = static_cast<std::size_t>(std::max<std::int64_t>(num_computed, 0));
  if (num_computed < 0 || num_computed > num_tokens || count > child.tokens.size() || count > parent.tokens.size() ||
      num_computed > std::ssize(parent.pages) * block_size_ || child.root != parent.root ||
      child.adapter != parent.adapter ||
      !std::ranges::equal(std::span(child.tokens).first(count), std::span(parent.tokens).first(count)))
    throw std::invalid_argument("slot " + std::to_string(slot) + " and slot " + std::to_string(source) +
                                " do not have the same salt, adapter and " + std::to_string(num_computed) +
                                " computed tokens");
  auto full = num_computed / block_size_;
  const bool copies_state = states_ && parent.states->length() == num_computed;
  if (states_ && !copies_state)
    full = begin_at_snapshot(child, std::span(parent.pages).first(static_cast<std::size_t>(full)));
  child.pages.assign(parent.pages.begin(), parent.pages.begin() + full);
  child.shared = std::min(full, parent.shared);
  for (std::int32_t page : child.pages) tree_.retain(page);
  if (!reserve(slot, num_tokens)) {
    release_pages(slot);
    return false;
  }
  if (copies_state) child.states->copy(*parent.states);
  child.num_computed = states_ && !copies_state ? full * block_size_ : num_computed;
  return true;
}

std::int32_t Sequences::open_branch(std::int32_t source, std::int64_t num_tokens,
                                    std::span<const std::int32_t> others) {
  const Sequence& sequence = at(source);
  if (num_tokens < sequence.num_prompt_tokens || num_tokens > std::ssize(sequence.tokens))
    throw std::invalid_argument("num_tokens=" + std::to_string(num_tokens) + " to branch from slot " +
                                std::to_string(source) + " at; it must be from " +
                                std::to_string(sequence.num_prompt_tokens) + ", its prompt, to " +
                                std::to_string(sequence.tokens.size()) + ", its length");
  std::vector<std::int32_t> tokens(sequence.tokens.begin(), sequence.tokens.begin() + num_tokens);
  tokens.insert(tokens.end(), others.begin(), others.end());
  const std::int32_t slot = open(std::move(tokens), sequence.num_prompt_tokens, sequence.sampling.config(),
                                 sequence.cache_salt, std::nullopt, nullptr, sequence.segment);
  at(slot).prompt_logprobs_done = at(source).prompt_logprobs_done;
  at(slot).adapter = at(source).adapter;
  return slot;
}

void Sequences::adopt(std::int32_t slot, std::int32_t branch) {
  Sequence &sequence = at(slot), &other = at(branch);
  std::swap(sequence.tokens, other.tokens);
  std::swap(sequence.pages, other.pages);
  std::swap(sequence.shared, other.shared);
  std::swap(sequence.num_computed, other.num_computed);
  std::swap(sequence.sampling, other.sampling);
  std::swap(sequence.num_followed, other.num_followed);
  std::swap(sequence.states, other.states);
  if (states_) sequence.states->succeed(*other.states);
}

void Sequences::set_adapter(std::int32_t slot, std::int32_t adapter) {
  Sequence& sequence = at(slot);
  if (!sequence.pages.empty())
    throw std::logic_error("slot " + std::to_string(slot) + " has pages; its adapter cannot change");
  if (adapter < 0) throw std::invalid_argument("adapter=" + std::to_string(adapter) + "; it must be 0 or more");
  sequence.adapter = adapter;
}

bool Sequences::reserve(std::int32_t slot, std::int64_t num_tokens) {
  Sequence& sequence = at(slot);
  check_positions(slot, num_tokens);
  const std::int64_t needed = (num_tokens + block_size_ - 1) / block_size_;
  const std::int64_t missing = needed - static_cast<std::int64_t>(sequence.pages.size());
  if (missing > pages_.free_pages() + tree_.cached_pages()) return false;
  if (states_ && !sequence.states->reserve(num_tokens)) return false;
  if (missing <= 0) return true;
  const auto count = static_cast<std::int32_t>(missing);
  tree_.evict(count - pages_.free_pages());
  return pages_.allocate(count, sequence.pages);
}

std::int64_t Sequences::pages_lacked(std::span<const std::int32_t> slots,
                                     std::span<const std::int64_t> num_tokens) const {
  if (slots.size() != num_tokens.size())
    throw std::invalid_argument(std::to_string(num_tokens.size()) + " numbers of tokens for " +
                                std::to_string(slots.size()) + " slots; give one for each");
  std::int64_t lacked = 0;
  for (std::size_t i = 0; i < slots.size(); i++) {
    check_positions(slots[i], num_tokens[i]);
    const std::int64_t needed = (num_tokens[i] + block_size_ - 1) / block_size_;
    lacked += std::max<std::int64_t>(needed - std::ssize(at(slots[i]).pages), 0);
  }
  return lacked;
}

std::vector<std::int32_t> Sequences::prefilling(std::span<const std::int32_t> slots) const {
  std::vector<std::int32_t> indices;
  for (std::size_t i = 0; i < slots.size(); i++) {
    const Sequence& sequence = at(slots[i]);
    if (sequence.num_computed < std::max(std::ssize(sequence.tokens) - 1, sequence.num_prompt_tokens))
      indices.push_back(static_cast<std::int32_t>(i));
  }
  return indices;
}

std::vector<std::int32_t> Sequences::growing(std::span<const std::int32_t> slots) const {
  std::vector<std::int32_t> indices;
  for (std::size_t i = 0; i < slots.size(); i++)
    if (std::ssize(at(slots[i]).tokens) > num_reserved_tokens(slots[i]))
      indices.push_back(static_cast<std::int32_t>(i));
  return indices;
}

std::int64_t Sequences::truncate(std::int32_t slot, std::int64_t num_tokens, bool recompute_last) {
  Sequence& sequence = at(slot);
  const std::int64_t least = std::max<std::int64_t>(sequence.num_prompt_tokens, 1);
  if (num_tokens < least || num_tokens > std::ssize(sequence.tokens))
    throw std::invalid_argument("num_tokens=" + std::to_string(num_tokens) + " to keep of slot " +
                                std::to_string(slot) + "; it must be from " + std::to_string(least) +
                                ", its prompt, to " + std::to_string(sequence.tokens.size()) + ", its length");
  if (sequence.constraint != nullptr && sequence.num_followed > num_tokens) {
    sequence.constraint->rollback(sequence.num_followed - num_tokens);
    sequence.num_followed = num_tokens;
  }
  for (; std::ssize(sequence.tokens) > num_tokens; sequence.tokens.pop_back())
    sequence.sampling.remove(sequence.tokens.back());
  std::int64_t kept = std::min((num_tokens + block_size_ - 1) / block_size_, std::ssize(sequence.pages));
  const std::int64_t written = (num_tokens - recompute_last) / block_size_;
  if (written < kept && pages_.references(sequence.pages[static_cast<std::size_t>(written)]) > 1) kept = written;
  for (; std::ssize(sequence.pages) > kept; sequence.pages.pop_back()) tree_.release(sequence.pages.back());
  sequence.shared = std::min(sequence.shared, kept);
  const std::int64_t left = std::min(num_tokens, kept * block_size_);
  sequence.num_computed = std::min({sequence.num_computed, left, num_tokens - recompute_last});
  return states_ ? resume(slot, std::min(num_tokens - recompute_last, left)) : left;
}

void Sequences::append(std::int32_t slot, std::int32_t token) {
  Sequence& sequence = at(slot);
  check_tokens({&token, 1}, vocab_size_);
  sequence.tokens.push_back(token);
  sequence.sampling.append(token);
}

void Sequences::share(std::int32_t slot, std::int64_t num_computed, std::span<const std::uint64_t> contents) {
  Sequence& sequence = at(slot);
  const std::int64_t most = std::min(std::ssize(sequence.tokens), std::ssize(sequence.pages) * block_size_);
  if (num_computed < 0 || num_computed > most)
    throw std::invalid_argument("num_computed=" + std::to_string(num_computed) + " tokens of slot " +
                                std::to_string(slot) + ", which has tokens and pages for " + std::to_string(most));
  if (states_) num_computed = sequence.states->end(num_computed);
  sequence.num_computed = num_computed;
  const std::span tokens(sequence.tokens);
  const auto size = static_cast<std::size_t>(block_size_), first = static_cast<std::size_t>(sequence.shared);
  for (; sequence.root != RadixTree::kNone && (sequence.shared + 1) * block_size_ <= num_computed; sequence.shared++) {
    const auto i = static_cast<std::size_t>(sequence.shared);
    const std::int32_t own = sequence.pages[i], parent = i == 0 ? sequence.root : sequence.pages[i - 1];
    const auto content = i - first < contents.size() ? std::optional(contents[i - first]) : std::nullopt;
    const std::int32_t kept = tree_.insert(parent, tokens.subspan(i * size, size), own, content);
    if (kept == own) continue;
    tree_.retain(kept);  // the same tokens, so the same bits: another sequence was first
    sequence.pages[i] = kept;
    tree_.release(own);
  }
  if (states_)
    sequence.states->take_snapshots(std::span(sequence.pages).first(static_cast<std::size_t>(sequence.shared)));
}

StatePath Sequences::write_states(std::int32_t slot, std::int64_t start, std::int64_t end, std::int64_t certain) {
  Sequence& sequence = at(slot);
  if (!states_) throw std::logic_error("the model has no state");
  if (end > std::min(std::ssize(sequence.tokens), num_reserved_tokens(slot)))
    throw std::invalid_argument("states up to token " + std::to_string(end) + " of slot " + std::to_string(slot) +
                                ", which has " + std::to_string(sequence.tokens.size()) + " tokens and pages for " +
                                std::to_string(num_reserved_tokens(slot)));
  return sequence.states->write(start, end, certain);
}

std::int64_t Sequences::resume(std::int32_t slot, std::int64_t num_computed) {
  Sequence& sequence = at(slot);
  if (num_computed < 0 || num_computed > num_reserved_tokens(slot))
    throw std::invalid_argument("num_computed=" + std::to_string(num_computed) + " tokens of slot " +
                                std::to_string(slot) + ", which has pages for " +
                                std::to_string(num_reserved_tokens(slot)));
  if (!states_) return sequence.num_computed = num_computed;
  sequence.states->cancel();
  const std::int64_t length = sequence.states->length();
  if (length != SequenceStates::kLost && length <= num_computed) return sequence.num_computed = length;
  const auto pages = std::span(sequence.pages).first(static_cast<std::size_t>(num_computed / block_size_));
  const std::int64_t kept = begin_at_snapshot(sequence, pages);
  for (; std::ssize(sequence.pages) > kept; sequence.pages.pop_back()) tree_.release(sequence.pages.back());
  sequence.shared = std::min(sequence.shared, kept);
  return sequence.num_computed = kept * block_size_;
}

/// Lets a sequence begin with the last snapshot of these pages, or without one. Returns the number of pages up to it.
std::int64_t Sequences::begin_at_snapshot(Sequence& sequence, std::span<const std::int32_t> pages) {
  while (!pages.empty() && states_->snapshot(pages.back()) == StateStore::kNone) pages = pages.first(pages.size() - 1);
  const std::int64_t kept = std::ssize(pages);
  sequence.states->begin(kept * block_size_, kept == 0 ? StateStore::kNone : states_->snapshot(pages.back()));
  return kept;
}

std::pair<std::int64_t, std::int32_t> Sequences::shared(std::int32_t slot) {
  const Sequence& sequence = at(slot);
  if (sequence.shared == 0) return {0, RadixTree::kNone};
  return {sequence.shared * block_size_, sequence.pages[static_cast<std::size_t>(sequence.shared - 1)]};
}

std::int32_t Sequences::private_pages(std::int32_t slot) {
  std::int32_t count = 0;
  for (std::int32_t page : std::views::reverse(at(slot).pages)) {  // a sequence that shares one has all before it
    if (pages_.references(page) > 1 + tree_.contains(page)) break;
    count++;
  }
  return count;
}

PageMap Sequences::page_map(std::span<const std::int32_t> pinned, std::int32_t max_cells) {
  return downsample(page_states(pinned), max_cells);
}

std::vector<PrefixRun> Sequences::outline(std::span<const std::int32_t> pinned, const OutlineLimits& limits) {
  return quire::outline(tree_, pages_, page_states(pinned), limits);
}

/// Returns the state of each page, where the pages of the `pinned` slots are pinned.
std::vector<std::uint8_t> Sequences::page_states(std::span<const std::int32_t> pinned) {
  std::vector<std::int32_t> pages;
  for (std::int32_t slot : pinned) std::ranges::copy(at(slot).pages, std::back_inserter(pages));
  return quire::page_states(pages_, tree_, pages);
}

void Sequences::release_pages(std::int32_t slot) {
  Sequence& sequence = at(slot);
  for (std::int32_t page : std::views::reverse(sequence.pages)) tree_.release(page);
  sequence.pages.clear();
  sequence.shared = sequence.num_computed = 0;
  if (states_) sequence.states->clear();
}

void Sequences::close(std::int32_t slot) {
  release_pages(slot);
  if (slots_[slot]->root != RadixTree::kNone) tree_.leave(slots_[slot]->root);
  slots_[slot].reset();
  free_.push_back(slot);
}

const Sequence& Sequences::at(std::int32_t slot) const {
  if (slot < 0 || static_cast<std::size_t>(slot) >= slots_.size() || !slots_[slot])
    throw std::out_of_range("no sequence is open in slot " + std::to_string(slot));
  return *slots_[slot];
}

}  // namespace quire
