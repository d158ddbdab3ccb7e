#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "weights/packing.h"

namespace quire {

struct Bf16 {
  std::uint16_t bits;
};
struct F16 {
  std::uint16_t bits;
};

inline float widen(float value) { return value; }
inline float widen(Bf16 value) { return std::bit_cast<float>(std::uint32_t{value.bits} << 16); }
inline float widen(F16 value) { return from_f16(value.bits); }

/// Converts an element, rounding to nearest even where `To` is narrower.
template <class To, class From>
To convert(From value) {
  if constexpr (std::is_same_v<To, From>) {
    return value;
  } else if constexpr (std::is_same_v<To, float>) {
    return widen(value);
  } else {
    const auto bits = std::bit_cast<std::uint32_t>(widen(value));
    if ((bits & 0x7fffffffu) > 0x7f800000u) return {static_cast<std::uint16_t>(bits >> 16 | 0x40u)};  // stay a NaN
    return {static_cast<std::uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16)};
  }
}

template <class T>
T element(const MatrixView& source, std::int64_t n, std::int64_t k) {
  T value;  // tensors in checkpoints are not aligned
  std::memcpy(&value, static_cast<const T*>(source.data) + n * source.n_stride + k * source.k_stride, sizeof value);
  return value;
}

}  // namespace quire
