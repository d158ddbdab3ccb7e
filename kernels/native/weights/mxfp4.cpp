#include "weights/mxfp4.h"

#include <stdexcept>
#include <string>

#include "weights/quantized_tile.h"

namespace quire {
namespace {

constexpr std::int64_t kGroup = 32;
constexpr std::uint8_t kNan = 255;
constexpr QuantizedFormat kFormat{.bits = 4, .group = kGroup, .scale = GroupScale::e8m0, .codebook = Codebook::e2m1};

bool fits(std::int64_t rows, std::int64_t stride, std::int64_t row_bytes, std::size_t bytes) {
  return stride >= 0 && static_cast<__int128>(rows - 1) * stride + row_bytes <= static_cast<__int128>(bytes);
}

}  // namespace

void Mxfp4Matrix::check(std::size_t code_bytes, std::size_t scale_bytes) const {
  const bool has_groups = n >= 1 && k >= 1 && k <= kMaxInputs && k % kGroup == 0;
  if (!has_groups || !fits(n, code_stride, k / 2, code_bytes) || !fits(n, scale_stride, k / kGroup, scale_bytes))
    throw std::invalid_argument("a matrix in MXFP4 of n=" + std::to_string(n) + " and k=" + std::to_string(k) +
                                " does not fit its " + std::to_string(code_bytes) + " bytes of codes and " +
                                std::to_string(scale_bytes) + " of scales; k must be a multiple of 32");
}

void pack_mxfp4(ThreadPool& pool, const Mxfp4Matrix& source, std::int64_t first, std::int64_t count,
                const QuantizedWeights& target, TileRange tiles) {
  check_fits(source.k, count, target);
  if (!(target.format == kFormat) || first < 0 || first + count > source.n)
    throw std::invalid_argument("rows " + std::to_string(first) + " to " + std::to_string(first + count - 1) + " of " +
                                std::to_string(source.n) + " in MXFP4 do not fit packed weights of another format");
  for_each_tile(pool, count, target, tiles, [&](QuantizedTile& tile, std::int64_t n, std::int64_t column) {
    const std::uint8_t* codes = source.codes + (first + n) * source.code_stride;
    const std::uint8_t* scales = source.scales + (first + n) * source.scale_stride;
    std::uint8_t* values = tile.column(column);
    for (std::int64_t i = 0; i < source.k / 2; i++) {
      values[2 * i] = codes[i] & 15;
      values[2 * i + 1] = codes[i] >> 4;
    }
    for (std::int64_t g = 0; g < source.k / kGroup; g++) {
      if (scales[g] == kNan) throw std::invalid_argument("a scale is a NaN");
      tile.sub_scales[column * tile.groups + g] = scales[g];
    }
  });
}

}  // namespace quire
