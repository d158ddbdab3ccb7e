// Compiled with -ffp-contract=fast: `+=` of a product of vectors is an FMA here, as it must be.
#include "weights/changed_norms.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <vector>

#include "compute/denormals.h"
#include "weights/elements.h"

namespace quire {
namespace {

constexpr std::int64_t kRows = 6, kColumns = 16;           // of a tile: 12 sums of 8 columns, in as many registers
constexpr std::int64_t kBlock = 16 * kRows, kDepth = 256;  // rows and columns of weights that are read at once

using Floats = float __attribute__((vector_size(32)));
using Doubles = double __attribute__((vector_size(32)));
using Tile = std::array<std::array<Floats, 2>, kRows>;
using Sums = std::array<Doubles, kColumns / 4>;  // of a row

/// Adds the products of 6 rows of B, [rank][6], and 16 columns of A, [rank][16].
[[gnu::noinline]] Tile change_of(const float* b, const float* a, std::int64_t rank) {
  Tile sums{};
  for (std::int64_t r = 0; r < rank; r++, a += kColumns, b += kRows) {
    Floats low, high;
    std::memcpy(&low, a, sizeof low);
    std::memcpy(&high, a + 8, sizeof high);
    for (std::int64_t n = 0; n < kRows; n++) {
      sums[n][0] += b[n] * low;
      sums[n][1] += b[n] * high;
    }
  }
  return sums;
}

/// Returns A with 16 columns at a time, [k / 16][rank][16], padded with zeros.
std::vector<float> panels_of(const LowRankChange& change, std::int64_t k) {
  std::vector<float> panels((k + kColumns - 1) / kColumns * kColumns * change.rank);
  for (std::int64_t r = 0; r < change.rank; r++)
    for (std::int64_t k0 = 0; k0 < k; k0 += kColumns)
      std::memcpy(panels.data() + k0 * change.rank + r * kColumns, change.a + r * k + k0,
                  std::min(kColumns, k - k0) * sizeof(float));
  return panels;
}

/// Reads `count` elements of row `n` from column `k0` on.
template <class T>
void read_row(const MatrixView& source, std::int64_t n, std::int64_t k0, std::int64_t count, float* row) {
  if (source.k_stride != 1) {
    for (std::int64_t k = 0; k < count; k++) row[k] = widen(element<T>(source, n, k0 + k));
    return;
  }
  std::array<T, kDepth> elements;
  std::memcpy(elements.data(), static_cast<const T*>(source.data) + n * source.n_stride + k0, count * sizeof(T));
  for (std::int64_t k = 0; k < count; k++) row[k] = widen(elements[k]);
}

/// Adds the squares of a row of W + B A: of 16 columns.
void add_squares(const float* weights, const std::array<Floats, 2>& change, Sums& sums) {
  std::array<float, kColumns> row;
  std::memcpy(row.data(), change.data(), sizeof row);
  for (std::int64_t i = 0; i < kColumns / 4; i++) {
    using Quad = float __attribute__((vector_size(16)));
    Quad weight, changed;
    std::memcpy(&weight, weights + 4 * i, sizeof weight);
    std::memcpy(&changed, row.data() + 4 * i, sizeof changed);
    const auto value = __builtin_convertvector(weight + changed, Doubles);
    sums[i] += value * value;  // exact products, so that an FMA has the same bits
  }
}

double folded(const Sums& sums) {
  const Doubles half = (sums[0] + sums[2]) + (sums[1] + sums[3]);
  return (half[0] + half[2]) + (half[1] + half[3]);
}

template <class T>
void norms_of(const MatrixView& source, const LowRankChange& change, float* norms) {
  const std::int64_t rank = change.rank;
  const std::vector<float> a = panels_of(change, source.k);
  std::vector<float> b(kBlock * rank), weights(kBlock * kDepth);
  std::array<Sums, kBlock> sums;
  for (std::int64_t first = 0; first < source.n; first += kBlock) {
    const std::int64_t rows = std::min(kBlock, source.n - first);
    for (std::int64_t n = 0; n < rows; n++)
      for (std::int64_t r = 0; r < rank; r++)
        b[(n / kRows * rank + r) * kRows + n % kRows] = change.b[(first + n) * rank + r];
    sums = {};
    for (std::int64_t k0 = 0; k0 < source.k; k0 += kDepth) {
      const std::int64_t depth = std::min(kDepth, source.k - k0);
      if (depth < kDepth) std::ranges::fill(weights, 0.0f);
      for (std::int64_t n = 0; n < rows; n++) read_row<T>(source, first + n, k0, depth, weights.data() + n * kDepth);
      for (std::int64_t k = 0; k < depth; k += kColumns)
        for (std::int64_t n0 = 0; n0 < rows; n0 += kRows) {
          const Tile tile = change_of(b.data() + n0 * rank, a.data() + (k0 + k) * rank, rank);
          for (std::int64_t n = n0; n < std::min(n0 + kRows, rows); n++)
            add_squares(weights.data() + n * kDepth + k, tile[n - n0], sums[n]);
        }
    }
    for (std::int64_t n = 0; n < rows; n++) norms[first + n] = static_cast<float>(std::sqrt(folded(sums[n])));
  }
}

}  // namespace

void changed_norms(const MatrixView& weights, const LowRankChange& change, float* norms) {
  const FlushDenormals flush;
  switch (weights.dtype) {
    case Dtype::bf16:
      return norms_of<Bf16>(weights, change, norms);
    case Dtype::f16:
      return norms_of<F16>(weights, change, norms);
    case Dtype::f32:
      return norms_of<float>(weights, change, norms);
  }
}

}  // namespace quire
