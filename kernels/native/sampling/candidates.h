#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace quire {

/// A token that may be sampled, and its weight.
struct Candidate {
  std::uint64_t key;   ///< token_key of its logit
  std::uint64_t mass;  ///< weight in units of 2^-40 of the likeliest token's
};

// Candidates are listed by token id. Functions that filter a list do so in place, keep that order, and return the rest;
// `sorted` is scratch memory. None sorts the list. Masses are integers, so every sum is exact in any order.

inline bool likelier(const Candidate& a, const Candidate& b) { return a.key < b.key; }

std::uint64_t total_mass(std::span<const Candidate> candidates);

/// Sets each mass to e^((logit - max) * inverse_temperature). No logit may be above `max`.
void weigh(std::span<Candidate> candidates, float max, float inverse_temperature);

/// Keeps the `count` likeliest; of equal logits the lower ids.
std::span<Candidate> likeliest(std::span<Candidate> candidates, std::size_t count, std::vector<Candidate>& sorted);

/// Keeps the fewest of the likeliest whose mass is at least `needed`, which is 1 to the total mass.
std::span<Candidate> nucleus(std::span<Candidate> candidates, std::uint64_t needed, std::vector<Candidate>& sorted);

/// Keeps the candidates for which `keep` is true. Each is written, but only some are kept: no branch to mispredict.
template <class Keep>
std::span<Candidate> filter(std::span<Candidate> candidates, Keep keep) {
  std::size_t kept = 0;
  for (const Candidate candidate : candidates) {
    candidates[kept] = candidate;
    kept += keep(candidate);
  }
  return candidates.first(kept);
}

}  // namespace quire
