#include "weights/quantization.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

namespace quire {
namespace {

constexpr float kMaxF16 = 65504.0f;

std::int64_t round_up(std::int64_t value, std::int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

std::int64_t checked_inputs(std::int64_t k) {
  if (k < 1 || k > kMaxInputs)
    throw std::invalid_argument("k=" + std::to_string(k) + " inputs; give 1 to " + std::to_string(kMaxInputs));
  return k;
}

/// Rounds to the nearest f16, ties to even; |value| <= kMaxF16. Integer arithmetic, since the pool's threads flush
/// denormals.
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

/// The 16 columns of a tile, before they are written in its layout.
struct Tile {
  Tile(const QuantizedFormat& format, std::int64_t k)
      : format(format),
        k(k),
        values(static_cast<std::size_t>(kTileRows * format.depth(k))),
        scales(static_cast<std::size_t>(kTileRows * format.groups(k))),
        zeros(scales.size()) {}

  void clear() {
    std::fill(values.begin(), values.end(), static_cast<std::uint8_t>(format.middle()));
    std::fill(scales.begin(), scales.end(), 0.0f);
    std::fill(zeros.begin(), zeros.end(), static_cast<std::int16_t>(format.middle()));
  }

  std::uint8_t* column(std::int64_t n) { return values.data() + n * format.depth(k); }

  QuantizedFormat format;
  std::int64_t k;
  std::vector<std::uint8_t> values;  ///< [16][depth]
  std::vector<float> scales;         ///< [16][groups]
  std::vector<std::int16_t> zeros;   ///< [16][groups]
};

std::uint32_t word_at(const std::uint8_t* values) {
  std::uint32_t word;
  std::memcpy(&word, values, sizeof word);
  return word;
}

/// Writes tile `number` of the target.
void write_tile(Tile& tile, const QuantizedWeights& target, std::int64_t number) {
  const QuantizedFormat& format = target.format;
  const std::int64_t half = number % 2, groups = format.groups(target.k), span = format.span(target.k);
  std::byte* group_data = target.data + number / 2 * format.block_bytes(target.k);
  for (std::int64_t g = 0; g < groups; g++, group_data += format.group_bytes(target.k)) {
    for (std::int64_t n = 0; n < kTileRows; n++) {
      const float scale = tile.scales[n * groups + g];
      const std::int64_t column = half * kTileRows + n;
      if (format.group) {
        const std::uint16_t bits = to_f16(scale);
        std::memcpy(group_data + column * 2, &bits, 2);
      } else {
        std::memcpy(group_data + column * 4, &scale, 4);
      }
      if (format.zeros)
        std::memcpy(group_data + format.header_bytes() - kCacheLine + column * 2, &tile.zeros[n * groups + g], 2);
    }
    std::byte* line = group_data + format.header_bytes() + half * kCacheLine;
    const std::int64_t step = 32 / format.bits;
    for (std::int64_t k = g * span; k < (g + 1) * span; k += step, line += 2 * kCacheLine) {
      std::array<std::uint32_t, kTileRows> words;
      for (std::int64_t n = 0; n < kTileRows; n++) {
        const std::uint8_t* values = tile.column(n) + k;
        words[n] = format.bits == 8 ? word_at(values) : word_at(values) | word_at(values + 4) << 4;
      }
      std::memcpy(line, words.data(), sizeof words);
    }
  }
}

/// Fills and writes every tile of the range: fill(tile, n, column) copies column n of the matrix to that of the tile.
template <class Fill>
void for_each_tile(ThreadPool& pool, std::int64_t columns, const QuantizedWeights& target, TileRange range, Fill fill) {
  std::atomic<std::int64_t> next{0};
  pool.run([&](int) {
    Tile tile(target.format, target.k);
    for (std::int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) * kTileRows < columns;) {
      tile.clear();
      for (std::int64_t n = 0; n < std::min(kTileRows, columns - i * kTileRows); n++) fill(tile, i * kTileRows + n, n);
      write_tile(tile, target, range.first + i * range.step);
    }
  });
}

/// Sets values[i] = round(w[i] / scale) + middle, clipped to the format. Returns the squared error, summed in 16 lanes
/// that are reduced in order.
float quantize_group(const float* w, std::int64_t count, float scale, const QuantizedFormat& format,
                     std::uint8_t* values) {
  constexpr std::int64_t kLanes = 16;
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to the nearest integer, ties to even
  const float inverse = scale == 0.0f ? 0.0f : 1.0f / scale;
  const auto middle = static_cast<float>(format.middle());
  std::array<float, kLanes> errors{};
  for (std::int64_t first = 0; first < count; first += kLanes)
    for (std::int64_t i = 0; i < kLanes; i++) {
      float q = (w[first + i] * inverse + kRound) - kRound;
      q = std::min(std::max(q, -middle), middle - 1.0f);
      const float error = w[first + i] - q * scale;
      errors[i] += error * error;
      values[first + i] = static_cast<std::uint8_t>(static_cast<std::int32_t>(q + middle));
    }
  float sum = 0.0f;
  for (float error : errors) sum += error;
  return sum;
}

/// Quantizes a column, padded with zeros to `depth`, into column `n` of the tile.
void quantize_column(const std::vector<float>& w, Tile& tile, std::int64_t n) {
  const QuantizedFormat& format = tile.format;
  const std::int64_t span = format.span(tile.k), groups = format.groups(tile.k);
  std::vector<std::uint8_t> trial(static_cast<std::size_t>(span));
  for (std::int64_t g = 0; g < groups; g++) {
    const float* group = w.data() + g * span;
    std::uint8_t* values = tile.column(n) + g * span;
    float largest = 0.0f;  // by magnitude, with its sign
    for (std::int64_t i = 0; i < span; i++)
      if (std::fabs(group[i]) > std::fabs(largest)) largest = group[i];
    if (format.group && std::fabs(largest) > kMaxF16)
      throw std::invalid_argument("a weight is " + std::to_string(largest) + ", which exceeds the range of f16 scales");
    float& best_scale = tile.scales[n * groups + g];
    if (format.bits == 8) {
      best_scale = std::fabs(largest) / 127.0f;
      if (format.group) best_scale = from_f16(to_f16(best_scale));
      quantize_group(group, span, best_scale, format, values);
      continue;
    }
    float best_error = 0.0f;
    for (int candidate = 0; candidate <= 10; candidate++) {  // the largest becomes -8, and is clipped more and more
      float scale = largest / -8.0f * (1.0f - 0.04f * static_cast<float>(candidate - 2));
      if (format.group) scale = from_f16(to_f16(scale));
      const float error = quantize_group(group, span, scale, format, trial.data());
      if (candidate == 0 || error < best_error) {
        best_error = error;
        best_scale = scale;
        std::copy(trial.begin(), trial.end(), values);
      }
    }
  }
}

void check_fits(std::int64_t k, std::int64_t columns, const QuantizedWeights& target) {
  if (k != target.k)
    throw std::invalid_argument("a matrix of k=" + std::to_string(k) +
                                " does not fit packed weights of k=" + std::to_string(target.k));
  if (columns < 1) throw std::invalid_argument("a matrix needs columns");
}

}  // namespace

void QuantizedFormat::check() const {
  if ((bits != 4 && bits != 8) || group < 0 || group > kMaxInputs || group % 32)
    throw std::invalid_argument("quantized weights of " + std::to_string(bits) + " bits in groups of " +
                                std::to_string(group) +
                                " are not supported; give 4 or 8 bits, and a group of 0 or a multiple of 32");
}

std::int64_t QuantizedFormat::depth(std::int64_t k) const {
  return round_up(checked_inputs(k), std::max<std::int64_t>(64, group));
}

std::int64_t QuantizedFormat::span(std::int64_t k) const {
  checked_inputs(k);
  return group ? group : round_up(k, 64);
}

std::int64_t QuantizedFormat::panel_bytes(std::int64_t k) const {
  return kTileRows * (depth(k) + groups(k) * static_cast<std::int64_t>(sizeof(float) + sizeof(std::int32_t)));
}

void pack_quantized(ThreadPool& pool, const QuantizedView& source, const QuantizedWeights& target, TileRange tiles) {
  check_fits(source.k, source.n, target);
  if (!source.zeros == target.format.zeros)
    throw std::invalid_argument(target.format.zeros ? "the format has zero points, the matrix has none"
                                                    : "the matrix has zero points, the format has none");
  const std::int64_t groups = target.format.groups(source.k);
  for_each_tile(pool, source.n, target, tiles, [&](Tile& tile, std::int64_t n, std::int64_t column) {
    std::memcpy(tile.column(column), source.values + n * source.k, static_cast<std::size_t>(source.k));
    for (std::int64_t g = 0; g < groups; g++) {
      const float scale = source.scales[n * groups + g];
      if (!std::isfinite(scale))
        throw std::invalid_argument("the scale of column " + std::to_string(n) + ", group " + std::to_string(g) +
                                    " is not finite");
      if (target.format.group && std::fabs(scale) > kMaxF16)
        throw std::invalid_argument("the scale of column " + std::to_string(n) + ", group " + std::to_string(g) +
                                    " is " + std::to_string(scale) + ", which exceeds f16");
      tile.scales[column * groups + g] = scale;
      if (source.zeros) tile.zeros[column * groups + g] = source.zeros[n * groups + g];
    }
  });
}

void quantize(ThreadPool& pool, const MatrixView& source, const QuantizedWeights& target, TileRange tiles) {
  check_fits(source.k, source.n, target);
  for_each_tile(pool, source.n, target, tiles, [&](Tile& tile, std::int64_t n, std::int64_t column) {
    std::vector<float> row(static_cast<std::size_t>(target.format.depth(source.k)));
    read_column(source, n, row.data());
    float sum = 0.0f;
    for (float value : row) sum += std::fabs(value) * 0x1p-40f;  // finite if and only if every value is
    if (!std::isfinite(sum))
      throw std::invalid_argument("weight column " + std::to_string(n) + " holds a value that is not finite");
    quantize_column(row, tile, column);
  });
}

}  // namespace quire
