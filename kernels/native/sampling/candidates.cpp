#include "sampling/candidates.h"

#include <algorithm>
#include <array>
#include <bit>

#include "sampling/logit_math.h"

namespace quire {
namespace {

// Buckets of masses, 32 an octave, up to the mass of the likeliest token.
std::size_t bucket_of(std::uint64_t mass) {
  const double from_one = static_cast<double>(static_cast<std::int64_t>(mass + 1));
  return static_cast<std::size_t>((std::bit_cast<std::uint64_t>(from_one) - std::bit_cast<std::uint64_t>(1.0)) >> 47);
}
constexpr std::size_t kBuckets = 40 * 32 + 1;

/// The key of the least likely of the fewest candidates whose mass reaches `needed`.
std::uint64_t last_key(std::span<Candidate> candidates, std::uint64_t needed) {
  while (candidates.size() > 1) {
    const std::size_t half = candidates.size() / 2;
    std::nth_element(candidates.begin(), candidates.begin() + half, candidates.end(), likelier);
    const std::uint64_t mass = total_mass(candidates.first(half));
    if (mass >= needed) {
      candidates = candidates.first(half);
    } else {
      needed -= mass;
      candidates = candidates.subspan(half);
    }
  }
  return candidates[0].key;
}

}  // namespace

std::uint64_t total_mass(std::span<const Candidate> candidates) {
  std::uint64_t total = 0;
  for (const Candidate& candidate : candidates) total += candidate.mass;
  return total;
}

void weigh(std::span<Candidate> candidates, float max, float inverse_temperature) {
  std::array<float, kMassBlock> logits;
  std::array<std::uint64_t, kMassBlock> masses;
  logits.fill(max);
  for (std::size_t begin = 0; begin < candidates.size(); begin += kMassBlock) {
    const auto block = candidates.subspan(begin, std::min(kMassBlock, candidates.size() - begin));
    for (std::size_t i = 0; i < block.size(); ++i) logits[i] = logit_of(block[i].key);
    masses_of(logits.data(), max, inverse_temperature, masses.data());
    for (std::size_t i = 0; i < block.size(); ++i) block[i].mass = masses[i];
  }
}

std::span<Candidate> likeliest(std::span<Candidate> candidates, std::size_t count, std::vector<Candidate>& sorted) {
  if (candidates.size() <= count) return candidates;
  sorted.assign(candidates.begin(), candidates.end());
  std::nth_element(sorted.begin(), sorted.begin() + (count - 1), sorted.end(), likelier);
  return filter(candidates, [last = sorted[count - 1].key](const Candidate& c) { return c.key <= last; });
}

std::span<Candidate> nucleus(std::span<Candidate> candidates, std::uint64_t needed, std::vector<Candidate>& sorted) {
  // A histogram finds the bucket in which the sum of mass from the likeliest down reaches `needed`; only the tokens in
  // that bucket have to be ranked.
  std::array<std::uint64_t, kBuckets> mass_of_bucket{};
  for (const Candidate& c : candidates) mass_of_bucket[bucket_of(c.mass)] += c.mass;
  std::size_t bucket = kBuckets - 1;
  while (mass_of_bucket[bucket] < needed) needed -= mass_of_bucket[bucket--];
  sorted.assign(candidates.begin(), candidates.end());
  const auto tied = filter(sorted, [bucket](const Candidate& c) { return bucket_of(c.mass) == bucket; });
  return filter(candidates, [last = last_key(tied, needed)](const Candidate& c) { return c.key <= last; });
}

}  // namespace quire
