#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <list>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "kv_cache/sequences.h"
#include "speculation/token_index.h"

namespace quire {

struct TextProposerConfig {
  std::int32_t shortest = 5;      ///< fewest tokens that have to match
  std::int32_t longest = 5;       ///< most tokens that are compared
  bool majority = false;          ///< go on as most of the places found do, and not as the latest does
  std::int32_t most_answers = 0;  ///< most answers kept for each salt, from which drafts come as well
  bool own_text = true;           ///< look in the sequence's own text, and not only in what was predicted
  float factor = 0;               ///< most drafts for each token that matches; 0: no such bound
};

/// Proposes what followed the last tokens of a sequence where they occurred before: in its own text, or in the answers
/// of earlier sequences of the same cache salt.
///
/// It learns how often drafts hold, by the length of the match and for each sequence, and proposes them as far as they
/// probably do. Memory is bounded: what is predicted and the last 16,384 tokens of each sequence, 262,144 of the
/// answers of a salt, and 16 salts.
class TextProposer {
 public:
  /// Throws std::invalid_argument unless 1 <= shortest <= longest <= 64 and the other numbers are 0 or more.
  TextProposer(Sequences& sequences, const TextProposerConfig& config);

  /// Appends drafts to each of the sequences: at most `most[i]`, only as long as their probability is `least` or more,
  /// and as far as KV pages can be had. Returns how many.
  std::vector<std::int32_t> propose(std::span<const std::int32_t> slots, std::span<const std::int32_t> most,
                                    double least);

  /// Notes how many of the drafts that were proposed last for each slot have held.
  void learn(std::span<const std::int32_t> slots, std::span<const std::int32_t> accepted);

  /// Takes this text for what a sequence will probably say: drafts come from it too, at first from its beginning. To be
  /// called before the first `propose` for the slot. Throws std::invalid_argument for tokens that are not in the
  /// vocabulary.
  void predict(std::int32_t slot, std::span<const std::int32_t> tokens);

  /// Keeps the answer of a sequence, which is about to be closed, for later ones of its salt, and forgets the slot.
  void end(std::int32_t slot);

  /// The probability that a draft holds after a match of `length` tokens, if those before it do.
  double acceptance(std::int32_t length) const { return acceptance_[level(length)]; }

 private:
  static constexpr std::int32_t kLevels = 8;

  struct State {
    std::int64_t number;  ///< number of its sequence: the slot may have another one by now
    TokenIndex own;
    std::int64_t num_indexed = 0;
    double tried = 0, held = 0;              ///< drafts tried lately, and those of them that were accepted
    std::vector<std::int32_t> lengths = {};  ///< length of the match before each draft that was proposed last
  };
  struct Answers {
    std::string salt;
    TokenIndex texts;
    std::deque<TokenIndex::Place> begins = {};  ///< beginnings of the texts, in order
  };

  static std::int32_t level(std::int32_t length);
  State& new_state(std::int32_t slot, const Sequence& sequence, std::int64_t num_predicted);
  State& state_of(std::int32_t slot, const Sequence& sequence);
  const TokenIndex* answers_for(const Sequence& sequence) const;
  const TokenIndex* look_up(const State& state, const Sequence& sequence);
  void draft(State& state, const Sequence& sequence, std::int32_t most, double least);
  std::int32_t token(const TokenIndex& index, TokenIndex::Place place) const;
  std::int32_t next_token(const TokenIndex& index);
  std::int32_t append(std::int32_t slot, const Sequence& sequence);

  Sequences& sequences_;
  TextProposerConfig config_;
  std::array<double, kLevels> acceptance_;
  std::unordered_map<std::int32_t, State> states_;
  std::list<Answers> answers_;  ///< answers of each salt, the salt used last first
  std::vector<TokenIndex::Match> found_, others_;
  std::vector<std::int32_t> drafts_;
  bool is_own_ = false;  ///< the match is in the sequence's own text, which the drafts go on
  double share_ = 1;     ///< share of the places that go on with the token chosen last
};

}  // namespace quire
