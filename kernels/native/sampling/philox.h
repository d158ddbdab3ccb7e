#pragma once

#include <array>
#include <cstdint>

namespace quire {

/// Philox4x32 with 10 rounds: a bijection of `counter` under `key` whose outputs for successive counters are random.
/// Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
constexpr std::array<std::uint32_t, 4> philox_block(std::array<std::uint32_t, 4> counter,
                                                    std::array<std::uint32_t, 2> key) {
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t a = std::uint64_t{0xD2511F53} * counter[0];
    const std::uint64_t b = std::uint64_t{0xCD9E8D57} * counter[2];
    counter = {static_cast<std::uint32_t>(b >> 32) ^ counter[1] ^ key[0], static_cast<std::uint32_t>(b),
               static_cast<std::uint32_t>(a >> 32) ^ counter[3] ^ key[1], static_cast<std::uint32_t>(a)};
    key[0] += 0x9E3779B9;
    key[1] += 0xBB67AE85;
  }
  return counter;
}

/// Random number `index` for the token at `position` of a sequence with this `seed`: in [0, 1), a multiple of 2^-53. It
/// depends on nothing else, so a sequence that is resumed or computed elsewhere gets the same.
constexpr double uniform(std::uint64_t seed, std::uint64_t position, std::uint64_t index = 0) {
  const auto low = [](std::uint64_t x) { return static_cast<std::uint32_t>(x); };
  const auto high = [](std::uint64_t x) { return static_cast<std::uint32_t>(x >> 32); };
  const auto block = philox_block({low(position), high(position), low(index), high(index)}, {low(seed), high(seed)});
  return static_cast<double>((std::uint64_t{block[1]} << 32 | block[0]) >> 11) * 0x1p-53;
}

}  // namespace quire
