#pragma once

#include <cstddef>
#include <cstdint>

#include "compute/abi.h"
#include "compute/thread_pool.h"
#include "weights/packing.h"

namespace quire {

/// The format of quantized weights, and of the activations that they are multiplied with (layout: emit/layout.py). The
/// scales of groups are f16, those of whole columns f32.
struct QuantizedFormat {
  int bits;                ///< 4 or 8
  std::int64_t group = 0;  ///< elements of k that share a scale; 0: the whole column
  bool zeros = false;      ///< each group has its own zero point; otherwise it is the middle of the range

  bool operator==(const QuantizedFormat&) const = default;

  /// Throws std::invalid_argument unless there are 4 or 8 bits and `group` is a multiple of 32 up to kMaxInputs.
  void check() const;

  // The functions of k throw std::invalid_argument unless k is from 1 to kMaxInputs.

  std::int64_t middle() const { return std::int64_t{1} << (bits - 1); }  ///< the value of 0 without zero points
  std::int64_t line_depth() const { return 32 / bits; }                  ///< elements of k in a line
  std::int64_t span(std::int64_t k) const;                               ///< elements of k that share a scale
  std::int64_t depth(std::int64_t k) const;  ///< k as quantized activations hold it: whole groups and whole lines
  std::int64_t groups(std::int64_t k) const { return (k + span(k) - 1) / span(k); }  ///< the last is padded
  std::int64_t header_bytes() const { return kPackedBlock * ((group ? 2 : 4) + (zeros ? 2 : 0)); }  ///< of a group
  std::int64_t group_bytes(std::int64_t k) const { return header_bytes() + span(k) * kPackedBlock * bits / 8; }
  std::int64_t block_bytes(std::int64_t k) const { return groups(k) * group_bytes(k); }  ///< of 32 columns
  std::int64_t panel_bytes(std::int64_t k) const;  ///< of 16 rows of quantized activations
};

/// Packed quantized weights of `k` inputs.
struct QuantizedWeights {
  std::byte* data;
  QuantizedFormat format;
  std::int64_t k;
};

/// A quantized matrix w[n, k] = (values - zeros) * scales as a checkpoint stores it, in the groups of its target.
struct QuantizedView {
  const std::uint8_t* values;  ///< [n][k]
  const float* scales;         ///< [n][groups]
  const std::int16_t* zeros;   ///< [n][groups], or null for the middle of the range
  std::int64_t n, k;
};

/// Packs `source` into `tiles` of `target`. The scales of groups are rounded to f16. Throws std::invalid_argument if
/// `source` does not fit `target`, or a scale is not finite or exceeds f16.
void pack_quantized(ThreadPool& pool, const QuantizedView& source, const QuantizedWeights& target, TileRange tiles);

/// Quantizes `source` and packs it into `tiles` of `target`. int8: scale = max |w| / 127. int4: the best of eleven
/// scales by squared error, for each group. The same bits on every host. Throws as `pack_quantized` does, and for a
/// weight that is not finite.
void quantize(ThreadPool& pool, const MatrixView& source, const QuantizedWeights& target, TileRange tiles);

}  // namespace quire
