#pragma once

#include <cstddef>
#include <cstdint>

#include "compute/thread_pool.h"
#include "weights/packing.h"
#include "weights/quantization.h"

namespace quire {

/// A matrix w[n, k] in MXFP4 as gpt-oss stores it: bytes of two codes, that of the even k in the low half, and apart
/// from them an exponent for each 32 of k. Strides are in bytes.
struct Mxfp4Matrix {
  const std::uint8_t* codes;
  const std::uint8_t* scales;
  std::int64_t n, k;
  std::int64_t code_stride, scale_stride;

  /// Throws std::invalid_argument unless k is a multiple of 32 and all rows lie in so many bytes of memory.
  void check(std::size_t code_bytes, std::size_t scale_bytes) const;
};

/// Packs rows [first, first + count) of `source` into `tiles` of `target`; bits are copied. Throws
/// std::invalid_argument if they do not fit, or a scale is a NaN.
void pack_mxfp4(ThreadPool& pool, const Mxfp4Matrix& source, std::int64_t first, std::int64_t count,
                const QuantizedWeights& target, TileRange tiles);

}  // namespace quire
