#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "compute/thread_pool.h"

namespace quire {

inline constexpr std::int64_t kMaxInputs = std::int64_t{1} << 31;  ///< k of a matrix

/// The type of a float in memory.
enum class Dtype { bf16, f16, f32 };

/// Returns the dtype named `bf16`, `f16` or `f32`; throws std::invalid_argument for any other name.
Dtype dtype_of(const std::string& name);

/// Widens an f16 by its bits.
float from_f16(std::uint16_t bits);

/// A matrix w[n, k] as a checkpoint stores it; strides in elements.
struct MatrixView {
  const void* data;
  Dtype dtype;
  std::int64_t n, k;
  std::int64_t n_stride, k_stride;

  /// Throws std::invalid_argument unless there are elements, and all of them lie in `bytes` of memory.
  void check(std::size_t bytes) const;
};

/// Writes w[n, 0 .. k) as f32.
void read_column(const MatrixView& source, std::int64_t n, float* column);

/// The tiles of 16 columns that a matrix fills in packed weights: `first`, `first + step`, and so on.
struct TileRange {
  std::int64_t first = 0;
  std::int64_t step = 1;

  /// Returns the blocks of two tiles up to the one with the last tile of `columns` columns. Throws
  /// std::invalid_argument for a negative tile, or a step below 1.
  std::int64_t blocks(std::int64_t columns) const;
};

/// Packed weights of `k` inputs in bf16 or f32 (layout: emit/layout.py).
struct PackedWeights {
  /// Takes the name of their storage: `bf16`, `bf16-paired` or `f32`. Throws std::invalid_argument for any other name.
  PackedWeights(std::byte* data, const std::string& storage, std::int64_t k);

  std::byte* data;
  Dtype dtype;
  bool is_paired;
  std::int64_t k;

  /// Bytes of 32 columns. Throws std::invalid_argument unless k is from 1 to kMaxInputs.
  std::size_t block_bytes() const;
};

/// Packs `source` into `tiles` of `target`, rounding to nearest even where the dtype is narrower. Elements that
/// `source` does not cover stay as they are (zero in fresh memory). Throws std::invalid_argument if `source` does not
/// fit `target`, or an element is an infinity or a NaN in the target's dtype.
void pack(ThreadPool& pool, const MatrixView& source, const PackedWeights& target, TileRange tiles);

/// A packed matrix w[n, 2 * pairs] of an adapter, in tiles of 16 n one after the other (layout: emit/adapters.py).
struct PairTiles {
  std::byte* data;
  Dtype dtype;  ///< bf16 or f32
  std::int64_t pairs;

  /// Bytes of the tiles of `columns` n. Throws std::invalid_argument for f16, or too many.
  std::size_t bytes(std::int64_t columns) const;
};

/// Packs `source` into `target`, from w[first_n, first_k] on, as `pack` does, on this thread alone. Returns false if an
/// element is an infinity or a NaN in the target's dtype.
bool pack_pairs(const MatrixView& source, const PairTiles& target, std::int64_t first_n, std::int64_t first_k);

}  // namespace quire
