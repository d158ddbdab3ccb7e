#include "weights/quantized_tile.h"

#include <array>
#include <bit>
#include <cstring>
#include <stdexcept>
#include <string>

namespace quire {
namespace {

std::uint32_t word_at(const std::uint8_t* values) {
  std::uint32_t word;
  std::memcpy(&word, values, sizeof word);
  return word;
}

template <class T>
void store(std::byte* target, T value) {
  std::memcpy(target, &value, sizeof value);
}

}  // namespace

std::uint16_t to_f16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const auto sign = static_cast<std::uint16_t>(bits >> 16 & 0x8000u);
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  const auto exponent = static_cast<std::int32_t>(magnitude >> 23);
  if (exponent < 102) return sign;                                  // below half of the least denormal
  const std::int32_t shift = exponent < 113 ? 126 - exponent : 13;  // denormals lose more
  const std::uint32_t mantissa = exponent < 113 ? (magnitude & 0x7fffffu) | 0x800000u : magnitude - (112u << 23);
  const std::uint32_t half = (1u << (shift - 1)) - 1u + (mantissa >> shift & 1u);
  return static_cast<std::uint16_t>(sign | (mantissa + half) >> shift);
}

QuantizedTile::QuantizedTile(const QuantizedFormat& format, std::int64_t k)
    : format(format),
      k(k),
      groups((format.groups(k) + format.super_groups() - 1) / format.super_groups() * format.super_groups()),
      values(static_cast<std::size_t>(kTileRows * format.depth(k))),
      scales(static_cast<std::size_t>(kTileRows * groups)),
      zeros(scales.size()),
      min_bits(scales.size()),
      sub_scales(scales.size()),
      sub_mins(scales.size()),
      supers(2 * scales.size() / static_cast<std::size_t>(format.super_groups())) {}

void QuantizedTile::clear() {
  const bool has_codes = format.codebook != Codebook::none;
  const auto middle = static_cast<std::uint8_t>(has_codes ? 0 : format.middle());  // the scale of absent columns is 0
  std::fill(values.begin(), values.end(), middle);
  std::fill(scales.begin(), scales.end(), 0.0f);
  std::fill(zeros.begin(), zeros.end(), static_cast<std::int16_t>(format.middle()));
  std::fill(min_bits.begin(), min_bits.end(), std::uint16_t{0});
  std::fill(sub_scales.begin(), sub_scales.end(), std::uint8_t{0});
  std::fill(sub_mins.begin(), sub_mins.end(), std::uint8_t{0});
  std::fill(supers.begin(), supers.end(), std::uint16_t{0});
}

void QuantizedTile::write(const QuantizedWeights& target, std::int64_t number) const {
  const std::int64_t half = number % 2, step = format.super_groups(), span = format.span(target.k);
  const std::int64_t stored = format.groups(target.k);
  std::byte* at = target.data + number / 2 * format.block_bytes(target.k);
  for (std::int64_t g = 0; g < stored; g += step, at += format.super_bytes(target.k)) {
    write_header(at, g, half);
    write_values(at + format.header_bytes(), g * span, std::min(step, stored - g) * span, half);
  }
}

void QuantizedTile::write_header(std::byte* header, std::int64_t first_group, std::int64_t half) const {
  const std::int64_t step = format.super_groups(), halves = 2 * kPackedBlock;
  const bool is_super = format.scale == GroupScale::super;
  for (std::int64_t n = 0; n < kTileRows; n++) {
    const std::int64_t column = half * kTileRows + n, i = n * groups + first_group;
    if (!format.group) {
      store(header + column * 4, scales[i]);
    } else if (format.scale == GroupScale::f16) {
      store(header + column * 2, to_f16(scales[i]));
      if (format.mins) store(header + halves + column * 2, min_bits[i]);
    }
    if (format.zeros) store(header + format.header_bytes() - halves + column * 2, zeros[i]);
    if (!is_super && format.scale != GroupScale::e8m0) continue;
    std::byte* subs = header + (is_super ? halves * (format.mins ? 2 : 1) : 0);
    if (is_super) {
      store(header + column * 2, supers[i / step * 2]);
      if (format.mins) store(header + halves + column * 2, supers[i / step * 2 + 1]);
    }
    for (std::int64_t g = 0; g < step; g++) {
      store(subs + g * kPackedBlock + column, sub_scales[i + g]);
      if (format.mins) store(subs + (step + g) * kPackedBlock + column, sub_mins[i + g]);
    }
  }
}

/// Writes `count` elements of each column in units of 32. A plane of p bits has p lines of a unit; byte b of a column
/// in line l holds element b of the quads of k from number l * (8 / p) on, p bits of each, the first one lowest.
void QuantizedTile::write_values(std::byte* lines, std::int64_t first_k, std::int64_t count, std::int64_t half) const {
  const auto depth = static_cast<std::int64_t>(values.size()) / kTileRows;
  std::byte* line = lines + half * kCacheLine;
  for (std::int64_t unit = first_k; unit < first_k + count; unit += kPlaneUnit) {
    int shift = 0;
    for (const int plane : format.planes()) {
      const int quads = 8 / plane;
      const auto mask = static_cast<std::uint32_t>((1 << plane) - 1) * 0x01010101u;
      for (int l = 0; l < plane; l++, line += 2 * kCacheLine) {
        std::array<std::uint32_t, kTileRows> words{};
        for (std::int64_t n = 0; n < kTileRows; n++) {
          const std::uint8_t* quad = values.data() + n * depth + unit + l * quads * 4;
          for (int i = 0; i < quads; i++) words[n] |= (word_at(quad + 4 * i) >> shift & mask) << (i * plane);
        }
        std::memcpy(line, words.data(), sizeof words);
      }
      shift += plane;
    }
  }
}

void check_fits(std::int64_t k, std::int64_t columns, const QuantizedWeights& target) {
  if (k != target.k)
    throw std::invalid_argument("a matrix of k=" + std::to_string(k) +
                                " does not fit packed weights of k=" + std::to_string(target.k));
  if (columns < 1) throw std::invalid_argument("a matrix needs columns");
}

}  // namespace quire
