#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <vector>

#include "compute/abi.h"
#include "compute/thread_pool.h"
#include "weights/quantization.h"

namespace quire {

inline constexpr float kMaxF16 = 65504.0f;

/// Rounds to the nearest f16, ties to even; |value| <= kMaxF16. Integer arithmetic, since the pool's threads flush
/// denormals.
std::uint16_t to_f16(float value);

/// The 16 columns of a tile, before they are written in its layout. Columns lie one after the other.
struct QuantizedTile {
  QuantizedTile(const QuantizedFormat& format, std::int64_t k);

  /// Makes all weights 0.
  void clear();

  std::uint8_t* column(std::int64_t n) { return values.data() + n * format.depth(k); }

  /// Writes tile `number` of the target.
  void write(const QuantizedWeights& target, std::int64_t number) const;

  QuantizedFormat format;
  std::int64_t k;
  std::int64_t groups;                   ///< groups of a column, with those that the last super group lacks
  std::vector<std::uint8_t> values;      ///< [16][depth], codes where there is a codebook
  std::vector<float> scales;             ///< [16][groups]: f16 or f32 ones
  std::vector<std::int16_t> zeros;       ///< [16][groups]
  std::vector<std::uint16_t> min_bits;   ///< [16][groups]: f16 minima
  std::vector<std::uint8_t> sub_scales;  ///< [16][groups]: bytes of super and e8m0 scales
  std::vector<std::uint8_t> sub_mins;    ///< [16][groups]
  std::vector<std::uint16_t> supers;     ///< [16][super groups][scale, minimum]: f16

 private:
  void write_header(std::byte* header, std::int64_t first_group, std::int64_t half) const;
  void write_values(std::byte* lines, std::int64_t first_k, std::int64_t count, std::int64_t half) const;
};

/// Fills and writes every tile of the range: fill(tile, n, column) copies column n of the matrix to that of the tile.
template <class Fill>
void for_each_tile(ThreadPool& pool, std::int64_t columns, const QuantizedWeights& target, TileRange range, Fill fill) {
  std::atomic<std::int64_t> next{0};
  pool.run([&](int) {
    QuantizedTile tile(target.format, target.k);
    for (std::int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) * kTileRows < columns;) {
      tile.clear();
      for (std::int64_t n = 0; n < std::min(kTileRows, columns - i * kTileRows); n++) fill(tile, i * kTileRows + n, n);
      tile.write(target, range.first + i * range.step);
    }
  });
}

/// Throws std::invalid_argument unless a matrix of `columns` columns of `k` fits the target.
void check_fits(std::int64_t k, std::int64_t columns, const QuantizedWeights& target);

}  // namespace quire
