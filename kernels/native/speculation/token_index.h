#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace quire {

/// Texts, and where in them the last tokens of a sequence occurred before.
///
/// The places of each run of `run` tokens form a chain, the latest first, as in LZ77. The last `capacity` tokens are
/// kept, rounded up to a power of two; memory grows with them, 16 bytes a token at most.
class TokenIndex {
 public:
  using Place = std::int64_t;  ///< position among all tokens that were ever appended

  /// Throws std::invalid_argument unless 1 <= run <= 64 and run <= capacity.
  TokenIndex(std::int32_t run, std::int64_t capacity);

  /// Appends a token of the present text.
  void append(std::int32_t token);

  /// Begins another text: nothing is found across its beginning.
  void end_text();

  /// Drops the texts that end before `place`.
  void forget_before(Place place);

  Place end() const { return end_; }  ///< the place after the last token

  /// Returns the token at a place, kNone at the end of a text and where nothing is kept.
  std::int32_t token(Place place) const;

  /// A place after which the texts may go on as the sequence does, and how many tokens before it are the same.
  struct Match {
    Place place;
    std::int32_t length;
  };

  /// Finds places after the last tokens of `sequence`, the latest first: of the `most_places` latest ones those with
  /// the longest match, of at most `longest` tokens. None if fewer than `run` tokens match.
  void find(std::span<const std::int32_t> sequence, std::int32_t longest, std::int32_t most_places,
            std::vector<Match>& found) const;

  static constexpr std::int32_t kNone = -1;

 private:
  static constexpr std::int32_t kNoLink = 0;  ///< no link: other links are distances back

  std::size_t bucket(std::span<const std::int32_t> run) const;
  std::size_t at(Place place) const { return static_cast<std::size_t>(place) & (tokens_.size() - 1); }
  void link(Place end);
  void grow();

  std::int32_t run_;
  std::int64_t capacity_;
  Place first_ = 0, end_ = 0;
  Place text_ = 0;                     ///< beginning of the present text
  std::vector<std::int32_t> tokens_;   ///< ring buffer, whose size is a power of two
  std::vector<std::int32_t> earlier_;  ///< distance from each run's end back to that of the run before it in its bucket
  std::vector<Place> latest_;          ///< end of the latest run of each bucket
};

}  // namespace quire
