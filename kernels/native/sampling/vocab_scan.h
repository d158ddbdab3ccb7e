#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "sampling/candidates.h"
#include "sampling/logit_math.h"

namespace quire {

/// Scratch memory of the sampler, one per thread; it grows to the vocabulary's size and is then reused.
struct SamplerScratch {
  std::vector<std::int32_t> block_max;   ///< order key of the largest logit of each block
  std::vector<std::int32_t> block_sort;  ///< copy of `block_max` that may be reordered
  std::vector<std::uint64_t> block_mass;
  std::vector<Candidate> candidates;
  std::vector<Candidate> sorted;  ///< copy of candidates that may be reordered
  std::vector<float> fetched;     ///< logits that were in the memory of a device
  std::vector<float> raw;         ///< the model's own logits
  std::vector<float> allowed;
};

/// Throws the std::runtime_error of a logit with this key, which is that of a NaN or of +inf.
[[noreturn]] void throw_bad_logit(std::int64_t token, std::int32_t key);

/// Throws the std::runtime_error of a row in which no token is left.
[[noreturn]] void throw_all_banned(std::size_t vocab_size);

/// Passes over one row of logits in blocks of kBlock. The maximum of each block, found first, lets later passes skip
/// the blocks that hold nothing of interest.
class VocabScan {
 public:
  static constexpr int kBlock = kMassBlock;

  /// Finds the maxima. Throws std::runtime_error if a logit is NaN or +inf. `logits` and `scratch` must outlive it.
  /// Where a logit becomes -inf later, `ban` must be called; masses stay relative to the first maximum.
  VocabScan(std::span<const float> logits, SamplerScratch& scratch);

  void ban(std::int32_t token);
  bool any() const;  ///< true if a logit is left that is not -inf

  /// Returns the share of the total mass that the banned token had. After `weigh`.
  std::uint64_t drop_mass(std::int32_t token, float inverse_temperature);

  std::int32_t max_key() const { return max_key_; }
  float max() const;

  /// The likeliest token; of equal ones the lowest.
  std::int32_t argmax() const;

  /// Total mass of e^((logit - max) * inverse_temperature); leaves each block's in scratch.block_mass.
  std::uint64_t weigh(float inverse_temperature);

  /// The token, in order of ids, where the running sum of mass first exceeds `target`. After `weigh`.
  std::int32_t token_at(std::uint64_t target, float inverse_temperature) const;

  /// An order key that at least `count` tokens reach, and not many more where ties are few.
  std::int32_t key_reached_by(std::int32_t count);

  /// All tokens whose order key is at least `least`, by id, with no mass yet; kept in scratch.candidates.
  std::span<Candidate> collect(std::int32_t least);

  /// The rank of the token's logit, from 1; of equal ones the lower id comes first.
  std::int32_t rank(std::int32_t token) const;

 private:
  template <class F>
  void with_block(std::size_t block, F&& use) const;

  std::span<const float> logits_;
  SamplerScratch& scratch_;
  std::int32_t max_key_ = 0;
};

}  // namespace quire
