#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "compute/thread_pool.h"
#include "weights/packing.h"
#include "weights/quantization.h"

namespace quire {

struct QuantizedTile;

/// A block of a GGUF type, and the format that keeps its bits.
struct GgufType {
  const char* name;
  QuantizedFormat format;
  std::int64_t elements;  ///< elements of a block
  std::int64_t bytes;     ///< bytes of a block

  /// Writes the values and scales of block number `block` of column `n`. Throws std::invalid_argument for a scale that
  /// is not finite.
  void (*decode)(const std::uint8_t* bytes, std::int64_t block, QuantizedTile& tile, std::int64_t n);
};

/// Returns the type by its name in ggml; throws std::invalid_argument if it is not known.
const GgufType& gguf_type(const std::string& name);

/// A matrix w[n, k] in blocks along k. If `heads` is not 0, rows 2 j and 2 j + 1 of each of so many heads stand for the
/// matrix's rows j and j + size / 2.
struct GgufMatrix {
  const std::uint8_t* data;
  const GgufType* type;
  std::int64_t n, k;
  std::int64_t heads;

  /// Throws std::invalid_argument unless there are whole blocks and heads, and all lie in `bytes` of memory.
  void check(std::size_t bytes) const;

  const std::uint8_t* row(std::int64_t n) const;
};

/// Packs rows [first, first + count) of `source` into `tiles` of `target`; bits are copied, nothing is rounded. Throws
/// std::invalid_argument if they do not fit.
void pack_gguf(ThreadPool& pool, const GgufMatrix& source, std::int64_t first, std::int64_t count,
               const QuantizedWeights& target, TileRange tiles);

/// Writes the values of all rows, f32 [n, k], each product and sum rounded. Throws std::invalid_argument for a scale
/// that is not finite.
void dequantize_gguf(const GgufMatrix& source, float* target);

}  // namespace quire
