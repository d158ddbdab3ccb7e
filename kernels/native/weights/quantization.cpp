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

constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to the nearest integer, ties to even

/// A sum over a group, in lanes that are reduced in order.
struct LaneSum {
  static constexpr std::int64_t kLanes = 16;

  void add(std::int64_t lane, float value) { lanes[static_cast<std::size_t>(lane)] += value; }
  float total() const {
    float sum = 0.0f;
    for (float lane : lanes) sum += lane;
    return sum;
  }
  std::array<float, kLanes> lanes{};
};

/// Replaces each group of `size` values, a power of two, by its Hadamard transform divided by `size`. Kernels transform
/// activations without dividing (emit/rotation.py), so that products stay what they were.
void rotate(std::vector<float>& row, std::int64_t size) {
  const float factor = 1.0f / static_cast<float>(size);  // exact
  for (auto group = row.begin(); group != row.end(); group += size) {
    for (std::int64_t half = 1; half < size; half *= 2)
      for (std::int64_t i = 0; i < size; i++)
        if (!(i & half)) {
          const float low = group[i], high = group[i + half];
          group[i] = low + high;
          group[i + half] = low - high;
        }
    for (std::int64_t i = 0; i < size; i++) group[i] *= factor;
  }
}

/// Quantizes a column, padded with zeros to `depth`, into column `n` of the tile: the largest value of a group is 127.
void quantize_column(const std::vector<float>& w, QuantizedTile& tile, std::int64_t n) {
  const QuantizedFormat& format = tile.format;
  const std::int64_t span = format.span(tile.k), groups = format.groups(tile.k);
  const auto middle = static_cast<float>(format.middle());
  for (std::int64_t g = 0; g < groups; g++) {
    const float* group = w.data() + g * span;
    std::uint8_t* values = tile.column(n) + g * span;
    float largest = 0.0f;
    for (std::int64_t i = 0; i < span; i++) largest = std::max(largest, std::fabs(group[i]));
    if (format.group && largest > kMaxF16)
      throw std::invalid_argument("a weight is " + std::to_string(largest) + ", which exceeds the range of f16 scales");
    float scale = largest / 127.0f;
    if (format.group) scale = from_f16(to_f16(scale));
    tile.scales[n * groups + g] = scale;
    const float inverse = scale == 0.0f ? 0.0f : 1.0f / scale;
    for (std::int64_t i = 0; i < span; i++) {
      const float q = (group[i] * inverse + kRound) - kRound;
      values[i] =
          static_cast<std::uint8_t>(static_cast<std::int32_t>(std::min(std::max(q, -middle), middle - 1) + middle));
    }
  }
}

/// A group as values times a scale, less a minimum; neither is negative.
struct Affine {
  float scale = 0.0f, minimum = 0.0f;
};

/// A group's weights, and the importance of their squared errors.
struct Group {
  const float* w;
  const float* importance;
  std::int64_t count;
};

/// Sets values[i] = round((w[i] + minimum) / scale), clipped to the format. Returns the squared error.
float quantize_affine(const Group& group, Affine affine, float largest, float* values) {
  const float inverse = affine.scale == 0.0f ? 0.0f : 1.0f / affine.scale;
  LaneSum errors;
  for (std::int64_t first = 0; first < group.count; first += LaneSum::kLanes)
    for (std::int64_t i = 0; i < LaneSum::kLanes; i++) {
      float q = ((group.w[first + i] + affine.minimum) * inverse + kRound) - kRound;
      q = std::min(std::max(q, 0.0f), largest);
      const float error = group.w[first + i] - (q * affine.scale - affine.minimum);
      errors.add(i, error * error * group.importance[first + i]);
      values[first + i] = q;
    }
  return errors.total();
}

/// Returns the scale and the minimum that fit the values best, by least squares.
Affine fit_affine(const Group& group, const float* values) {
  LaneSum sum, w_sum, q_sum, qq_sum, wq_sum;
  for (std::int64_t first = 0; first < group.count; first += LaneSum::kLanes)
    for (std::int64_t i = 0; i < LaneSum::kLanes; i++) {
      const float importance = group.importance[first + i], x = group.w[first + i], q = values[first + i];
      sum.add(i, importance);
      w_sum.add(i, importance * x);
      q_sum.add(i, importance * q);
      qq_sum.add(i, importance * q * q);
      wq_sum.add(i, importance * x * q);
    }
  const float n = sum.total();
  const float sw = w_sum.total(), sq = q_sum.total(), sqq = qq_sum.total(), swq = wq_sum.total();
  const float determinant = n * sqq - sq * sq;
  if (determinant > 0.0f) {
    const Affine best{(n * swq - sw * sq) / determinant, (sq * swq - sqq * sw) / determinant};
    if (best.scale >= 0.0f && best.minimum >= 0.0f) return best;
  }
  return {sqq > 0.0f ? std::max(swq / sqq, 0.0f) : 0.0f, 0.0f};
}

/// Returns the best of several scales of a group by squared error, each improved by least squares.
Affine best_affine(const Group& group, float largest, float* values) {
  const auto [low, high] = std::minmax_element(group.w, group.w + group.count);
  const float least = std::min(*low, 0.0f), range = std::max(*high, 0.0f) - least;
  Affine best{range / largest, -least};
  float best_error = quantize_affine(group, best, largest, values);
  for (int candidate = 0; candidate <= 7 && best_error > 0.0f; candidate++) {
    Affine trial{range / (largest - 1.0f + 0.3f * static_cast<float>(candidate)), -least};
    for (int round = 0; round < 2; round++) {
      const float error = quantize_affine(group, trial, largest, values);
      if (error < best_error) {
        best_error = error;
        best = trial;
      }
      trial = fit_affine(group, values);
    }
  }
  return best;
}

/// Quantizes a column with minima and super scales, as `quantize_column` does: a super scale is that of the largest
/// scale of its groups, whose bytes are rounded; then the values are those nearest to what kernels compute.
void quantize_affine_column(const std::vector<float>& w, const std::vector<float>& importance, QuantizedTile& tile,
                            std::int64_t n) {
  constexpr float kMostScale = 127.0f, kMostMinimum = 255.0f;
  const QuantizedFormat& format = tile.format;
  const std::int64_t span = format.group, step = format.super_groups(), groups = format.groups(tile.k);
  const auto largest = static_cast<float>(format.largest());
  std::vector<float> values(static_cast<std::size_t>(span));
  std::vector<Affine> found(static_cast<std::size_t>(step));
  const auto group_of = [&](std::int64_t g) { return Group{w.data() + g * span, importance.data() + g * span, span}; };
  for (std::int64_t first = 0; first < groups; first += step) {
    const std::int64_t count = std::min(step, groups - first);
    Affine most;
    for (std::int64_t g = 0; g < count; g++) {
      const Affine best = best_affine(group_of(first + g), largest, values.data());
      most = {std::max(most.scale, best.scale), std::max(most.minimum, best.minimum)};
      found[static_cast<std::size_t>(g)] = best;
    }
    if (most.scale > kMaxF16 || most.minimum > kMaxF16)
      throw std::invalid_argument("weights of " + std::to_string(most.minimum) + " exceed the range of f16 scales");
    const std::uint16_t scale_bits = to_f16(most.scale / kMostScale), min_bits = to_f16(most.minimum / kMostMinimum);
    const Affine unit{from_f16(scale_bits), from_f16(min_bits)};
    const auto super = static_cast<std::size_t>((n * tile.groups + first) / step * 2);
    tile.supers[super] = scale_bits;
    tile.supers[super + 1] = min_bits;
    for (std::int64_t g = 0; g < count; g++) {
      const Affine wanted = found[static_cast<std::size_t>(g)];
      const auto byte = [](float value, float unit, float most) {
        return unit == 0.0f ? 0.0f : std::min(std::nearbyint(value / unit), most);
      };
      const float scale = byte(wanted.scale, unit.scale, kMostScale);
      const float minimum = byte(wanted.minimum, unit.minimum, kMostMinimum);
      const auto i = static_cast<std::size_t>(n * tile.groups + first + g);
      tile.sub_scales[i] = static_cast<std::uint8_t>(scale);
      tile.sub_mins[i] = static_cast<std::uint8_t>(minimum);
      quantize_affine(group_of(first + g), {unit.scale * scale, unit.minimum * minimum}, largest, values.data());
      std::uint8_t* stored = tile.column(n) + (first + g) * span;
      for (std::int64_t k = 0; k < span; k++)
        stored[k] = static_cast<std::uint8_t>(values[static_cast<std::size_t>(k)]);
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

void quantize(ThreadPool& pool, const MatrixView& source, std::span<const float> importance,
              const QuantizedWeights& target, TileRange tiles) {
  const bool is_affine = target.format.scale == GroupScale::super && target.format.mins;
  const bool is_plain = target.format.scale == GroupScale::f16 && !target.format.mins && !target.format.zeros;
  if (!(is_affine && target.format.group % 32 == 0) && !(is_plain && target.format.bits == 8))
    throw std::invalid_argument(
        "weights are quantized to 8 bits with f16 scales, without zero points and minima, or in groups of 32 or more "
        "with super scales and minima");
  if (!importance.empty() && !is_affine)
    throw std::invalid_argument("the importance of inputs is for formats with super scales and minima");
  if (!importance.empty() && static_cast<std::int64_t>(importance.size()) != source.k)
    throw std::invalid_argument("importance has " + std::to_string(importance.size()) + " values for " +
                                std::to_string(source.k) + " inputs");
  check_fits(source.k, source.n, target);
  const auto depth = static_cast<std::size_t>(target.format.depth(source.k));
  std::vector<float> padded(importance.begin(), importance.end());
  padded.resize(depth, importance.empty() ? 1.0f : 0.0f);
  for_each_tile(pool, source.n, target, tiles, [&](QuantizedTile& tile, std::int64_t n, std::int64_t column) {
    std::vector<float> row(depth);
    read_column(source, n, row.data());
    float sum = 0.0f;
    for (float value : row) sum += std::fabs(value) * 0x1p-40f;  // finite if and only if every value is
    if (!std::isfinite(sum))
      throw std::invalid_argument("weight column " + std::to_string(n) + " holds a value that is not finite");
    if (target.format.rotated) rotate(row, target.format.group);
    if (is_affine)
      quantize_affine_column(row, padded, tile, column);
    else
      quantize_column(row, tile, column);
  });
}

}  // namespace quire
