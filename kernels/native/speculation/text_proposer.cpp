#include "speculation/text_proposer.h"

#include <algorithm>
#include <bit>
#include <stdexcept>
#include <string>
#include <utility>

namespace quire {
namespace {

constexpr std::int32_t kLongest = 64;
constexpr std::int32_t kPlaces = 32;                             // places that are compared
constexpr std::int64_t kOwnTokens = 1 << 14, kTokens = 1 << 18;  // tokens kept of a sequence, and of a salt's answers
constexpr std::size_t kSalts = 16;
constexpr double kFirstAcceptance = 0.6;  // acceptance before anything is known
constexpr double kLearn = 1.0 / 64;       // weight of one draft
constexpr double kForget = 0.9;           // factor of a sequence's counts at each proposal
constexpr double kPrior = 4;              // number of drafts that the acceptance over all sequences counts as
constexpr double kRevive = 1e-3;  // share of the distance to kFirstAcceptance, for a first draft that is not tried

}  // namespace

TextProposer::TextProposer(Sequences& sequences, const TextProposerConfig& config)
    : sequences_(sequences), config_(config) {
  if (config.shortest < 1 || config.shortest > config.longest || config.longest > kLongest || config.most_answers < 0 ||
      !(config.factor >= 0))
    throw std::invalid_argument("matches of " + std::to_string(config.shortest) + " to " +
                                std::to_string(config.longest) + " tokens; give 1 to " + std::to_string(kLongest) +
                                ", and no negative numbers");
  acceptance_.fill(kFirstAcceptance);
}

std::int32_t TextProposer::level(std::int32_t length) {
  const auto width = static_cast<std::int32_t>(std::bit_width(static_cast<std::uint32_t>(std::max(length, 1))));
  return std::min(width, kLevels) - 1;
}

TextProposer::State& TextProposer::new_state(std::int32_t slot, const Sequence& sequence, std::int64_t num_predicted) {
  const std::int64_t capacity = kOwnTokens + (num_predicted ? num_predicted + config_.shortest + 1 : 0);
  return states_.insert_or_assign(slot, State{sequence.number, TokenIndex(config_.shortest, capacity)}).first->second;
}

TextProposer::State& TextProposer::state_of(std::int32_t slot, const Sequence& sequence) {
  const auto found = states_.find(slot);
  const bool is_there = found != states_.end() && found->second.number == sequence.number;
  State& state = is_there ? found->second : new_state(slot, sequence, 0);
  if (!config_.own_text) return state;
  const std::int64_t first = std::ssize(sequence.tokens) - kOwnTokens;
  if (state.num_indexed < first) {
    state.own.end_text();
    state.num_indexed = first;
  }
  for (; state.num_indexed < std::ssize(sequence.tokens); state.num_indexed++)
    state.own.append(sequence.tokens[static_cast<std::size_t>(state.num_indexed)]);
  return state;
}

const TokenIndex* TextProposer::answers_for(const Sequence& sequence) const {
  if (!config_.most_answers || !sequence.cache_salt) return nullptr;
  const auto found = std::ranges::find(answers_, *sequence.cache_salt, &Answers::salt);
  return found == answers_.end() ? nullptr : &found->texts;
}

/// Finds the longest matches, into `found_`, and returns the index that has them: the own text rather than another.
const TokenIndex* TextProposer::look_up(const State& state, const Sequence& sequence) {
  state.own.find(sequence.tokens, config_.longest, kPlaces, found_);
  const TokenIndex* answers = answers_for(sequence);
  if (answers == nullptr) return &state.own;
  answers->find(sequence.tokens, config_.longest, kPlaces, others_);
  if (others_.empty() || (!found_.empty() && found_.front().length >= others_.front().length)) return &state.own;
  std::swap(found_, others_);
  return answers;
}

/// Returns the token at a place. Where the sequence's own text ends, it goes on with the drafts: what repeats itself at
/// once does so from them.
std::int32_t TextProposer::token(const TokenIndex& index, TokenIndex::Place place) const {
  const std::int64_t ahead = place - index.end();
  return ahead < 0 || !is_own_ ? index.token(place) : drafts_[static_cast<std::size_t>(ahead)];
}

/// Returns the token that comes next, and leaves the places in `found_` that go on with it, moved past it.
std::int32_t TextProposer::next_token(const TokenIndex& index) {
  std::int32_t chosen = token(index, found_.front().place);
  if (config_.majority) {
    std::ptrdiff_t most = 0;
    for (const TokenIndex::Match& match : found_) {
      const std::int32_t candidate = token(index, match.place);
      const auto votes = std::ranges::count(found_, candidate, [&](const auto& m) { return token(index, m.place); });
      if (candidate != TokenIndex::kNone && votes > most) most = votes, chosen = candidate;
    }
  }
  const auto before = static_cast<double>(found_.size());
  std::erase_if(found_, [&](const auto& match) { return token(index, match.place) != chosen; });
  share_ = static_cast<double>(found_.size()) / before;
  for (TokenIndex::Match& match : found_) match.place++, match.length++;
  return chosen;
}

/// Fills `drafts_` and the state's lengths.
void TextProposer::draft(State& state, const Sequence& sequence, std::int32_t most, double least) {
  drafts_.clear();
  state.lengths.clear();
  state.tried *= kForget;
  state.held *= kForget;
  const TokenIndex* index = look_up(state, sequence);
  is_own_ = config_.own_text && index == &state.own;
  if (found_.empty()) return;
  if (config_.factor > 0)
    most = std::min(most, static_cast<std::int32_t>(config_.factor * static_cast<float>(found_.front().length)));
  double probability = 1;
  while (std::ssize(drafts_) < most && !found_.empty()) {
    const std::int32_t length = found_.front().length, token = next_token(*index);
    if (token == TokenIndex::kNone) return;
    double& acceptance = acceptance_[static_cast<std::size_t>(level(length))];
    probability *= share_ * (kPrior * acceptance + state.held) / (kPrior + state.tried);
    if (probability < least) {
      acceptance += kRevive * (kFirstAcceptance - acceptance);
      return;
    }
    drafts_.push_back(token);
    state.lengths.push_back(length);
  }
}

/// Appends the drafts to the sequence, as far as its pages reach or the pool has some left. Returns how many.
std::int32_t TextProposer::append(std::int32_t slot, const Sequence& sequence) {
  const std::int64_t size = std::ssize(sequence.tokens);
  std::int64_t count = std::ssize(drafts_);
  if (count == 0) return 0;
  if (!sequences_.reserve(slot, size + count))
    count = std::min(count, std::ssize(sequence.pages) * sequences_.block_size() - size);
  for (std::int64_t i = 0; i < count; i++) sequences_.append(slot, drafts_[static_cast<std::size_t>(i)]);
  return static_cast<std::int32_t>(std::max<std::int64_t>(count, 0));
}

std::vector<std::int32_t> TextProposer::propose(std::span<const std::int32_t> slots, std::span<const std::int32_t> most,
                                                double least) {
  if (slots.size() != most.size()) throw std::invalid_argument("there must be a bound for each slot");
  std::vector<std::int32_t> counts(slots.size());
  for (std::size_t i = 0; i < slots.size(); i++) {
    const Sequence& sequence = sequences_.at(slots[i]);
    if (most[i] < 1 || (!config_.own_text && !states_.contains(slots[i]))) continue;
    State& state = state_of(slots[i], sequence);
    draft(state, sequence, most[i], least);
    counts[i] = append(slots[i], sequence);
    state.lengths.resize(static_cast<std::size_t>(counts[i]));
  }
  return counts;
}

void TextProposer::learn(std::span<const std::int32_t> slots, std::span<const std::int32_t> accepted) {
  if (slots.size() != accepted.size()) throw std::invalid_argument("there must be a count for each slot");
  for (std::size_t i = 0; i < slots.size(); i++) {
    const auto found = states_.find(slots[i]);
    if (found == states_.end()) continue;
    State& state = found->second;
    for (std::int32_t j = 0; j < std::ssize(state.lengths) && j <= accepted[i]; j++) {
      const double held = j < accepted[i] ? 1 : 0;
      double& acceptance = acceptance_[static_cast<std::size_t>(level(state.lengths[static_cast<std::size_t>(j)]))];
      acceptance += kLearn * (held - acceptance);
      state.tried += 1;
      state.held += held;
    }
    state.lengths.clear();
  }
}

void TextProposer::predict(std::int32_t slot, std::span<const std::int32_t> tokens) {
  const Sequence& sequence = sequences_.at(slot);
  for (const std::int32_t token : tokens)
    if (token < 0 || token >= sequences_.vocab_size())
      throw std::invalid_argument("token id " + std::to_string(token) + " is not in the vocabulary");
  State& state = new_state(slot, sequence, std::ssize(tokens));
  // The last tokens of the prompt lead to the first ones of the prediction.
  const std::int64_t prompt = sequence.num_prompt_tokens;
  for (std::int64_t i = std::max<std::int64_t>(prompt - config_.shortest, 0); i < prompt; i++)
    state.own.append(sequence.tokens[static_cast<std::size_t>(i)]);
  for (const std::int32_t token : tokens) state.own.append(token);
  state.own.end_text();
}

void TextProposer::end(std::int32_t slot) {
  const Sequence& sequence = sequences_.at(slot);
  states_.erase(slot);
  const std::int64_t size = std::ssize(sequence.tokens), prompt = sequence.num_prompt_tokens;
  if (!config_.most_answers || !sequence.cache_salt || size - prompt < config_.shortest) return;
  auto found = std::ranges::find(answers_, *sequence.cache_salt, &Answers::salt);
  if (found == answers_.end()) {
    if (answers_.size() == kSalts) answers_.pop_back();
    answers_.push_front({*sequence.cache_salt, TokenIndex(config_.shortest, kTokens)});
    found = answers_.begin();
  }
  answers_.splice(answers_.begin(), answers_, found);
  Answers& answers = *found;
  answers.begins.push_back(answers.texts.end());
  if (std::ssize(answers.begins) > config_.most_answers) {
    answers.begins.pop_front();
    answers.texts.forget_before(answers.begins.front());
  }
  // The last tokens of the prompt lead to the answer's first ones.
  const std::int64_t first = std::max<std::int64_t>(prompt - config_.shortest, 0);
  for (std::int64_t i = std::max(first, size - kTokens / 4); i < size; i++)
    answers.texts.append(sequence.tokens[static_cast<std::size_t>(i)]);
  answers.texts.end_text();
}

}  // namespace quire
