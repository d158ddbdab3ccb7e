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

#include "weights/quantized_tile.h"

namespace quire {
namespace {

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
void quantize_column(const std::vector<float>& w, QuantizedTile& tile, std::int64_t n) {
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

}  // namespace

void pack_quantized(ThreadPool& pool, const QuantizedView& source, const QuantizedWeights& target, TileRange tiles) {
  if (target.format.scale != GroupScale::f16 || target.format.mins || target.format.bits % 4)
    throw std::invalid_argument("arrays are packed in 4 or 8 bits, with f16 scales and without minima");
  check_fits(source.k, source.n, target);
  if (!source.zeros == target.format.zeros)
    throw std::invalid_argument(target.format.zeros ? "the format has zero points, the matrix has none"
                                                    : "the matrix has zero points, the format has none");
  const std::int64_t groups = target.format.groups(source.k);
  for_each_tile(pool, source.n, target, tiles, [&](QuantizedTile& tile, std::int64_t n, std::int64_t column) {
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
  if (target.format.scale != GroupScale::f16 || target.format.mins || target.format.zeros || target.format.bits % 4)
    throw std::invalid_argument(
        "weights are quantized to 4 or 8 bits, with f16 scales, without zero points and minima");
  check_fits(source.k, source.n, target);
  for_each_tile(pool, source.n, target, tiles, [&](QuantizedTile& tile, std::int64_t n, std::int64_t column) {
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
