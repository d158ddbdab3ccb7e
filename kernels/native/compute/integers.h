#pragma once

#include <cstddef>
#include <cstdint>

#include "compute/packing.h"
#include "compute/thread_pool.h"

namespace quire {

/// How a matrix of integers is packed; emit/layout.py describes it under the same names.
struct IntegerFormat {
  int bits;            ///< 4 or 8
  std::int64_t group;  ///< elements of k that share a scale, 0 for all of a column
  bool zeros;          ///< each group has a zero point; else it is the middle of the range

  std::int64_t middle() const { return std::int64_t{1} << (bits - 1); }
  std::int64_t depth(std::int64_t k) const;
  std::int64_t span(std::int64_t k) const;
  std::int64_t groups(std::int64_t k) const { return (k + span(k) - 1) / span(k); }
  std::int64_t header_bytes() const { return (group ? 64 : 128) + (zeros ? 64 : 0); }
  std::int64_t group_bytes(std::int64_t k) const { return header_bytes() + span(k) * 32 * bits / 8; }
  std::int64_t block_bytes(std::int64_t k) const { return groups(k) * group_bytes(k); }
};

/// Where packed integers of `k` elements a column lie.
struct PackedIntegers {
  std::byte* data;
  IntegerFormat format;
  std::int64_t k;
};

/// A matrix of integers w[n, k] = (values - zeros) * scales, with the groups of its target.
struct IntegerView {
  const std::uint8_t* values;  ///< [n][k]
  const float* scales;         ///< [n][groups]
  const std::int16_t* zeros;   ///< [n][groups], or null for the middle of the range
  std::int64_t n, k;
};

/// Packs integers into the tiles of 16 columns `first_tile`, `first_tile + tile_step`, ... of `target`. The scales of
/// groups are rounded to f16. Throws std::invalid_argument when `source` does not fit `target`.
void pack_integers(ThreadPool& pool, const IntegerView& source, const PackedIntegers& target, std::int64_t first_tile,
                   std::int64_t tile_step);

/// Quantizes `source` and packs the integers. int8: scale = max |w| / 127. int4: of eleven scales for each group that
/// with the least squared error. The same bits on every host. Throws as `pack_integers` does, and for a weight that
/// is not finite.
void quantize(ThreadPool& pool, const MatrixView& source, const PackedIntegers& target, std::int64_t first_tile,
              std::int64_t tile_step);

}  // namespace quire
