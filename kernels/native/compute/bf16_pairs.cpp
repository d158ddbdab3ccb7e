#include "compute/bf16_pairs.h"

#include <algorithm>
#include <array>
#include <bit>
#include <chrono>
#include <cmath>
#include <iterator>
#include <limits>
#include <random>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "compute/denormals.h"

namespace quire {
namespace {

constexpr int kLanes = 16;
constexpr int kVectorsOfEachKind = 128;

constexpr std::uint32_t kSpecial[] = {0x0000, 0x8000, 0x0001, 0x807f, 0x0080, 0x8080, 0x3f80, 0xbf81, 0x3300, 0x3380,
                                      0x4b80, 0x1f80, 0x9fff, 0x5f80, 0xdfff, 0x7f7f, 0xff7f, 0x7f80, 0xff80, 0x7fc0};
constexpr std::uint32_t kSignAndMantissa = 0x807fffff;

/// Makes operands of one lane: finite ones of chosen exponents, with random signs and mantissas, or special values.
class Operands {
 public:
  std::uint32_t acc = 0, a = 0, b = 0;

  void special() {
    const auto one = [this] { return kSpecial[below(std::size(kSpecial))]; };
    acc = one() << 16 | (below(2) == 0 ? 0 : bits() >> 16);
    a = one() << 16 | one();
    b = one() << 16 | one();
  }

  /// Three summands whose exponents are up to `gap` apart, around those of products of 2^`exponent`, which may be
  /// denormal or beyond the largest.
  void near(int exponent, int gap) {
    const int shift = below(2 * gap + 1) - gap, first = exponent / 2 + 127 + below(41) - 20;
    a = bf16(first) << 16 | bf16(first + shift);
    const int second = exponent + 254 - first;
    b = bf16(second) << 16 | bf16(second);
    acc = real(exponent + 127 + below(2 * gap + 1) - gap);
  }

  /// An accumulator that the upper product cancels, all or nearly.
  void cancelling() {
    near(below(60) - 30, 20);
    const float product = std::bit_cast<float>(a & 0xffff0000) * std::bit_cast<float>(b & 0xffff0000);
    acc = std::bit_cast<std::uint32_t>(-product) ^ (bits() & 3);
  }

 private:
  std::uint32_t bits() { return static_cast<std::uint32_t>(random_()); }
  int below(int limit) { return static_cast<int>(bits() % static_cast<std::uint32_t>(limit)); }
  std::uint32_t real(int exponent) {
    return static_cast<std::uint32_t>(std::clamp(exponent, 0, 254)) << 23 | (bits() & kSignAndMantissa);
  }
  std::uint32_t bf16(int exponent) { return real(exponent) >> 16; }

  std::mt19937 random_{1};
};

float upper(std::uint32_t pair) { return std::bit_cast<float>(pair & 0xffff0000); }
float lower(std::uint32_t pair) { return std::bit_cast<float>(pair << 16); }

#if defined(__x86_64__)
#define QUIRE_BF16_PAIRS __attribute__((target("avx512f,avx512vl,avx512bw,avx512bf16")))

QUIRE_BF16_PAIRS void multiply_add_pairs(float* acc, const std::uint32_t* a, const std::uint32_t* b) {
  const __m512i x = _mm512_loadu_si512(a), y = _mm512_loadu_si512(b);
  const __m512 sum = _mm512_dpbf16_ps(_mm512_loadu_ps(acc), (__m512bh)x, (__m512bh)y);
  _mm512_storeu_ps(acc, sum);
}

constexpr int kChains = 12, kRounds = 256;

/// Returns a sum of kChains independent chains of kRounds calls of `add(acc)`, which stay in registers.
template <typename Add>
QUIRE_BF16_PAIRS inline __attribute__((always_inline)) float sum_of_chains(Add add) {
  __m512 acc[kChains];
#pragma GCC unroll 16
  for (int chain = 0; chain < kChains; ++chain) acc[chain] = _mm512_set1_ps(static_cast<float>(chain));
  for (int i = 0; i < kRounds; ++i)
#pragma GCC unroll 16
    for (int chain = 0; chain < kChains; ++chain) acc[chain] = add(acc[chain]);
#pragma GCC unroll 16
  for (int chain = 1; chain < kChains; ++chain) acc[0] = _mm512_add_ps(acc[0], acc[chain]);
  return _mm512_cvtss_f32(acc[0]);
}

QUIRE_BF16_PAIRS float chains_of_pairs(float seed) {
  const __m512 x = _mm512_set1_ps(seed);
  return sum_of_chains([x](__m512 acc) QUIRE_BF16_PAIRS { return _mm512_dpbf16_ps(acc, (__m512bh)x, (__m512bh)x); });
}

QUIRE_BF16_PAIRS float chains_of_fma(float seed) {
  const __m512 x = _mm512_set1_ps(seed);
  return sum_of_chains([x](__m512 acc) QUIRE_BF16_PAIRS { return _mm512_fmadd_ps(x, x, acc); });
}

double cost() {
  using Clock = std::chrono::steady_clock;
  constexpr int kRepeats = 50;  // runs of less than a microsecond each, so that some are not interrupted
  auto pairs = Clock::duration::max(), fma = Clock::duration::max();
  volatile float seed = 1.0F, result = 0;
  for (int i = 0; i < kRepeats; ++i) {
    const auto start = Clock::now();
    result = chains_of_fma(seed);
    const auto middle = Clock::now();
    result = chains_of_pairs(seed);
    fma = std::min(fma, middle - start);
    pairs = std::min(pairs, Clock::now() - middle);
  }
  static_cast<void>(result);
  return std::chrono::duration<double>(pairs) / std::chrono::duration<double>(fma);
}
#endif

}  // namespace

PairProducts host_pair_products() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512bf16")) return &multiply_add_pairs;
#endif
  return nullptr;
}

bool adds_by_fma(PairProducts products) {
  const FlushDenormals guard;
  Operands operands;
  for (int kind = 0; kind < 6; ++kind)
    for (int vector = 0; vector < kVectorsOfEachKind; ++vector) {
      std::array<std::uint32_t, kLanes> a, b;
      std::array<float, kLanes> acc, expected;
      for (int lane = 0; lane < kLanes; ++lane) {
        if (kind == 0) operands.special();
        if (kind == 1) operands.cancelling();
        if (kind == 2) operands.near(0, 30);
        if (kind == 3) operands.near(0, 3);
        if (kind == 4) operands.near(-128, 12);  // near the smallest
        if (kind == 5) operands.near(127, 3);    // near the largest
        a[lane] = operands.a;
        b[lane] = operands.b;
        acc[lane] = std::bit_cast<float>(operands.acc);
        expected[lane] = std::fma(upper(a[lane]), upper(b[lane]), acc[lane]);
        expected[lane] = std::fma(lower(a[lane]), lower(b[lane]), expected[lane]);
      }
      products(acc.data(), a.data(), b.data());
      for (int lane = 0; lane < kLanes; ++lane) {
        const bool both_nan = std::isnan(acc[lane]) && std::isnan(expected[lane]);
        if (!both_nan && std::bit_cast<std::uint32_t>(acc[lane]) != std::bit_cast<std::uint32_t>(expected[lane]))
          return false;
      }
    }
  return true;
}

double pair_products_cost() {
#if defined(__x86_64__)
  if (host_pair_products() != nullptr) return cost();
#endif
  return 0;
}

}  // namespace quire
