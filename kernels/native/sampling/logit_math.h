#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>

namespace quire {

// Scalar math of the sampler. Nothing here calls libm, whose exp and log differ between CPUs in the last bit; and
// everything that is summed or compared over the vocabulary is an integer, so results depend neither on the width of
// vectors nor on the order of sums.

/// An integer that orders floats: a < b iff order_key(a) < order_key(b); -0 and +0 are equal. NaNs lie outside
/// [kLeastKey, kMostKey], the keys of -inf and +inf.
inline std::int32_t order_key(float x) {
  const std::int32_t bits = std::bit_cast<std::int32_t>(x + 0.0f);
  return bits ^ ((bits >> 31) & 0x7fffffff);
}
inline constexpr std::int32_t kMostKey = 0x7f800000;
inline constexpr std::int32_t kLeastKey = static_cast<std::int32_t>(0xff800000u ^ 0x7fffffffu);

inline float key_value(std::int32_t key) { return std::bit_cast<float>(key ^ ((key >> 31) & 0x7fffffff)); }

/// A token and its logit as one integer, smaller for likelier tokens; of equal logits the lower id is likelier.
inline std::uint64_t token_key(std::int32_t order_key, std::int32_t token) {
  return std::uint64_t{0x7fffffffu - static_cast<std::uint32_t>(order_key)} << 32 | static_cast<std::uint32_t>(token);
}
inline std::int32_t token_of(std::uint64_t key) { return static_cast<std::int32_t>(key & 0xffffffffu); }
inline float logit_of(std::uint64_t key) {
  return key_value(static_cast<std::int32_t>(0x7fffffffu - static_cast<std::uint32_t>(key >> 32)));
}

/// Weights are counted in units of 2^-40 of the likeliest token's weight.
inline constexpr double kMassOfOne = 0x1p40;
/// Logits further below the maximum than this, in units of the temperature, weigh nothing (e^-29 < 2^-41).
inline constexpr float kReach = 29.0f;

/// e^x for x <= 0 to within 2 ulp; x below -30 counts as -30. Cephes' expf.
inline float exp_weight(float x) {
  constexpr float kRound = 0x1.8p23f;  // adding and subtracting it rounds to an integer
  // The bits of negative floats rise with their magnitude. A comparison of floats would keep loops from being vectors.
  x = std::bit_cast<float>(std::min(std::bit_cast<std::uint32_t>(x), std::bit_cast<std::uint32_t>(-30.0f)));
  const float n = (x * 0x1.715476p0f + kRound) - kRound;
  const float r = (x - n * 0.693359375f) - n * -2.12194440e-4f;  // ln 2 in two parts; the first product is exact
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  return std::bit_cast<float>(std::bit_cast<std::int32_t>(p) + (static_cast<std::int32_t>(n) << 23));
}

/// A weight in [0, 1] as a count of 2^-40, rounded to nearest.
inline std::uint64_t mass_of_weight(float weight) {
  // The sum lies in [2^12, 2^13), where a double's last bit is worth 2^-40.
  return std::bit_cast<std::uint64_t>(static_cast<double>(weight) + 0x1p12) - std::bit_cast<std::uint64_t>(0x1p12);
}

/// Logits are weighed in blocks of this size: loops with a fixed count become vector code on every CPU.
inline constexpr std::size_t kMassBlock = 64;

/// masses[i] = e^((logits[i] - max) * inverse_temperature) for one block of logits, none of them above `max`.
inline void masses_of(const float* logits, float max, float inverse_temperature, std::uint64_t* masses) {
  float weights[kMassBlock];
  for (std::size_t i = 0; i < kMassBlock; ++i) weights[i] = exp_weight((logits[i] - max) * inverse_temperature);
  for (std::size_t i = 0; i < kMassBlock; ++i) masses[i] = mass_of_weight(weights[i]);
}

/// Log probability of a logit where `log_sum` is the logarithm of the mass of all, in masses of the largest, `max`.
inline float logprob_of(float logit, float max, double log_sum) {
  return static_cast<float>(static_cast<double>(logit - max) - log_sum);
}

/// ln x for finite, normal x > 0, to within 2 ulp of a double near 1 and 1 ulp elsewhere.
inline double natural_log(double x) {
  const std::uint64_t bits = std::bit_cast<std::uint64_t>(x);
  // x = m * 2^n with m in [sqrt(1/2), sqrt(2)); then ln m = 2 artanh(s), s = (m - 1) / (m + 1).
  const std::int64_t n = static_cast<std::int64_t>(bits - 0x3fe6a09e667f3bcd) >> 52;
  const double m = std::bit_cast<double>(bits - (static_cast<std::uint64_t>(n) << 52));
  const double s = (m - 1.0) / (m + 1.0);
  double series = 0.0;
  for (int k = 23; k >= 3; k -= 2) series = series * (s * s) + 1.0 / k;
  return static_cast<double>(n) * 0x1.62e42fefa39efp-1 + (2.0 * s + 2.0 * s * (s * s) * series);
}

}  // namespace quire
