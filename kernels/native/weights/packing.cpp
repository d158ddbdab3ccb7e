#include "weights/packing.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <stdexcept>

#include "compute/abi.h"
#include "weights/elements.h"

namespace quire {
namespace {

std::uint32_t bits_of(float value) { return std::bit_cast<std::uint32_t>(value); }
std::uint32_t bits_of(Bf16 value) { return std::uint32_t{value.bits} << 16; }

/// Collects whether any of the floats is an infinity or a NaN: one whose exponent has all bits set.
class FiniteCheck {
 public:
  template <class T>
  void add(T value) {
    carries_ |= (bits_of(value) & 0x7f800000u) + 0x00800000u;
  }

  /// Adds two bf16 in one word.
  void add_pair(std::uint32_t pair) { carries_ |= (pair & 0x7f807f80u) + 0x00800080u; }

  bool passed() const { return (carries_ & 0x80008000u) == 0; }

 private:
  std::uint32_t carries_ = 0;
};

/// One tile: [16 pairs][16 n][2 k] in bf16, [16 pairs][2 k][16 n] in f32.
template <class From, class To>
void pack_elements(const MatrixView& source, std::int64_t n0, std::int64_t k0, To* tile, FiniteCheck& finite) {
  constexpr std::int64_t n_step = std::is_same_v<To, float> ? 1 : 2, k_step = std::is_same_v<To, float> ? 16 : 1;
  const std::int64_t columns = std::min(kTileRows, source.n - n0), depth = std::min(kPackedBlock, source.k - k0);
  std::array<From, kPackedBlock> row;
  for (std::int64_t n = 0; n < columns; n++) {
    if (source.k_stride == 1)
      std::memcpy(row.data(), static_cast<const From*>(source.data) + (n0 + n) * source.n_stride + k0,
                  static_cast<std::size_t>(depth) * sizeof(From));
    else
      for (std::int64_t k = 0; k < depth; k++) row[k] = element<From>(source, n0 + n, k0 + k);
    for (std::int64_t k = 0; k < depth; k++) {
      const To value = convert<To>(row[k]);
      finite.add(value);
      tile[k / 2 * (2 * kTilePairs) + n * n_step + k % 2 * k_step] = value;
    }
  }
}

/// The fast path for a whole tile of contiguous bf16: transposes 16 rows of 16 pairs, each pair as one word.
void pack_whole_bf16_tile(const MatrixView& source, std::int64_t n0, std::int64_t k0, Bf16* tile, FiniteCheck& finite) {
  std::array<std::array<std::uint32_t, kTilePairs>, kTileRows> rows;
  for (std::int64_t n = 0; n < kTileRows; n++)
    std::memcpy(rows[n].data(), static_cast<const Bf16*>(source.data) + (n0 + n) * source.n_stride + k0,
                sizeof rows[n]);
  for (std::int64_t pair = 0; pair < kTilePairs; pair++) {
    std::array<std::uint32_t, kTileRows> line;
    for (std::int64_t n = 0; n < kTileRows; n++) {
      line[n] = rows[n][pair];
      finite.add_pair(line[n]);
    }
    std::memcpy(tile + pair * 2 * kTileRows, line.data(), sizeof line);
  }
}

template <class From, class To>
void pack_tile(const MatrixView& source, std::int64_t n0, std::int64_t k0, To* tile, FiniteCheck& finite) {
  if constexpr (std::is_same_v<From, Bf16> && std::is_same_v<To, Bf16>) {
    const bool whole = n0 + kTileRows <= source.n && k0 + kPackedBlock <= source.k;
    if (whole && source.k_stride == 1) return pack_whole_bf16_tile(source, n0, k0, tile, finite);
  }
  pack_elements<From, To>(source, n0, k0, tile, finite);
}

/// Turns the lines of two pairs, (even, odd) each, into one of the even k and one of the odd ones, the first pair's in
/// the upper halves.
void pair_tile(Bf16* tile) {
  std::array<std::uint32_t, kTileRows> first, second;
  for (std::int64_t pair = 0; pair < kTilePairs; pair += 2) {
    Bf16* lines = tile + pair * 2 * kTileRows;
    std::memcpy(first.data(), lines, sizeof first);
    std::memcpy(second.data(), lines + 2 * kTileRows, sizeof second);
    for (std::int64_t n = 0; n < kTileRows; n++) {
      const std::uint32_t even = first[n] << 16 | (second[n] & 0xffffu);
      second[n] = (first[n] & 0xffff0000u) | second[n] >> 16;
      first[n] = even;
    }
    std::memcpy(lines, first.data(), sizeof first);
    std::memcpy(lines + 2 * kTileRows, second.data(), sizeof second);
  }
}

constexpr std::int64_t kMostTiles = std::int64_t{1} << 31;

std::int64_t blocks_of(std::int64_t k) { return (k + kPackedBlock - 1) / kPackedBlock; }

template <class From, class To>
void pack_as(ThreadPool& pool, const MatrixView& source, const PackedWeights& target, TileRange range) {
  const std::int64_t tiles = (source.n + kTileRows - 1) / kTileRows;
  const std::int64_t k_blocks = blocks_of(source.k), target_blocks = blocks_of(target.k);
  constexpr std::int64_t tile_elements = kTileRows * kPackedBlock;
  std::atomic<std::int64_t> next{0};
  pool.run([&](int) {
    for (std::int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < tiles;) {
      const std::int64_t tile = range.first + i * range.step, n0 = i * kTileRows;
      To* column = reinterpret_cast<To*>(target.data) + (tile / 2 * target_blocks * 2 + tile % 2) * tile_elements;
      FiniteCheck finite;
      for (std::int64_t block = 0; block < k_blocks; block++, column += 2 * tile_elements) {
        pack_tile<From, To>(source, n0, block * kPackedBlock, column, finite);
        if constexpr (std::is_same_v<To, Bf16>) {
          if (target.is_paired) pair_tile(column);
        }
      }
      if (!finite.passed())
        throw std::invalid_argument("weight columns " + std::to_string(n0) + " to " +
                                    std::to_string(std::min(n0 + kTileRows, source.n) - 1) +
                                    " hold an infinity or a NaN, or a value beyond the range of " +
                                    (std::is_same_v<To, Bf16> ? "bf16" : "f32"));
    }
  });
}

template <class From>
void pack_from(ThreadPool& pool, const MatrixView& source, const PackedWeights& target, TileRange range) {
  switch (target.dtype) {
    case Dtype::bf16:
      return pack_as<From, Bf16>(pool, source, target, range);
    case Dtype::f32:
      return pack_as<From, float>(pool, source, target, range);
    case Dtype::f16:
      throw std::invalid_argument("packed weights are bf16 or f32, not f16");
  }
}

template <class From, class To>
bool pack_pairs_as(const MatrixView& source, const PairTiles& target, std::int64_t first_n, std::int64_t first_k) {
  constexpr std::int64_t n_step = std::is_same_v<To, float> ? 1 : 2, k_step = std::is_same_v<To, float> ? 16 : 1;
  FiniteCheck finite;
  for (std::int64_t n = 0; n < source.n; n++) {
    const std::int64_t column = first_n + n;
    To* lane = reinterpret_cast<To*>(target.data) + column / kTileRows * target.pairs * (2 * kTileRows) +
               column % kTileRows * n_step;
    for (std::int64_t k = 0; k < source.k; k++) {
      const To value = convert<To>(element<From>(source, n, k));
      const std::int64_t place = first_k + k;
      finite.add(value);
      lane[place / 2 * (2 * kTileRows) + place % 2 * k_step] = value;
    }
  }
  return finite.passed();
}

template <class From>
bool pack_pairs_from(const MatrixView& source, const PairTiles& target, std::int64_t first_n, std::int64_t first_k) {
  return target.dtype == Dtype::f32 ? pack_pairs_as<From, float>(source, target, first_n, first_k)
                                    : pack_pairs_as<From, Bf16>(source, target, first_n, first_k);
}

}  // namespace

float from_f16(std::uint16_t bits) {
  const std::uint32_t sign = (bits & 0x8000u) << 16, magnitude = bits & 0x7fffu;
  if (magnitude >= 0x7c00u) return std::bit_cast<float>(sign | 0x7f800000u | (magnitude << 13 & 0x7fffffu));
  // Denormals of f16 are normal in f32. Integer arithmetic, since the pool's threads read denormals as zero.
  if (magnitude < 0x400u) return static_cast<float>(magnitude) * (sign ? -0x1p-24f : 0x1p-24f);
  return std::bit_cast<float>(sign | ((magnitude << 13) + (112u << 23)));
}

Dtype dtype_of(const std::string& name) {
  if (name == "bf16") return Dtype::bf16;
  if (name == "f16") return Dtype::f16;
  if (name == "f32") return Dtype::f32;
  throw std::invalid_argument("dtype '" + name + "' is not supported; give bf16, f16 or f32");
}

void read_column(const MatrixView& source, std::int64_t n, float* column) {
  auto read = [&]<class T>(T) {
    for (std::int64_t k = 0; k < source.k; k++) column[k] = widen(element<T>(source, n, k));
  };
  switch (source.dtype) {
    case Dtype::bf16:
      return read(Bf16{});
    case Dtype::f16:
      return read(F16{});
    case Dtype::f32:
      return read(0.0f);
  }
}

void MatrixView::check(std::size_t bytes) const {
  const bool is_sane = n >= 1 && k >= 1 && n_stride >= 0 && k_stride >= 0;
  const auto last = static_cast<__int128>(n - 1) * n_stride + static_cast<__int128>(k - 1) * k_stride;
  if (!is_sane || (last + 1) * (dtype == Dtype::f32 ? 4 : 2) > static_cast<__int128>(bytes))
    throw std::invalid_argument("a matrix of n=" + std::to_string(n) + ", k=" + std::to_string(k) + " with strides " +
                                std::to_string(n_stride) + " and " + std::to_string(k_stride) + " does not fit " +
                                std::to_string(bytes) + " bytes; sizes must be at least 1, strides 0");
}

std::int64_t TileRange::blocks(std::int64_t columns) const {
  const __int128 last = first + static_cast<__int128>((columns - 1) / kTileRows) * step;
  if (first < 0 || step < 1 || last > kMostTiles)
    throw std::invalid_argument("first_tile=" + std::to_string(first) + " and tile_step=" + std::to_string(step) +
                                " of " + std::to_string(columns) + " columns; give 0 or more, and 1 or more");
  return static_cast<std::int64_t>(last) / 2 + 1;
}

PackedWeights::PackedWeights(std::byte* data, const std::string& storage, std::int64_t k)
    : data(data),
      dtype(dtype_of(storage == "bf16-paired" ? "bf16" : storage)),
      is_paired(storage == "bf16-paired"),
      k(k) {}

std::size_t PackedWeights::block_bytes() const {
  if (k < 1 || k > kMaxInputs)
    throw std::invalid_argument("packed weights of k=" + std::to_string(k) + "; give 1 to " +
                                std::to_string(kMaxInputs));
  return static_cast<std::size_t>(blocks_of(k) * kPackedBlock * kPackedBlock * (dtype == Dtype::f32 ? 4 : 2));
}

void pack(ThreadPool& pool, const MatrixView& source, const PackedWeights& target, TileRange range) {
  if (source.k > target.k)
    throw std::invalid_argument("a matrix of k=" + std::to_string(source.k) +
                                " does not fit packed weights of k=" + std::to_string(target.k));
  switch (source.dtype) {
    case Dtype::bf16:
      return pack_from<Bf16>(pool, source, target, range);
    case Dtype::f16:
      return pack_from<F16>(pool, source, target, range);
    case Dtype::f32:
      return pack_from<float>(pool, source, target, range);
  }
}

std::size_t PairTiles::bytes(std::int64_t columns) const {
  const std::int64_t tiles = columns / kTileRows + (columns % kTileRows != 0);
  std::int64_t found = 0;
  if (dtype == Dtype::f16 || columns < 1 || pairs < 1 ||
      __builtin_mul_overflow(pairs, 2 * kTileRows * (dtype == Dtype::f32 ? 4 : 2), &found) ||
      __builtin_mul_overflow(found, tiles, &found))
    throw std::invalid_argument("an adapter's matrix of " + std::to_string(columns) + " columns and " +
                                std::to_string(pairs) + " pairs; give 1 or more, in bf16 or f32");
  return static_cast<std::size_t>(found);
}

bool pack_pairs(const MatrixView& source, const PairTiles& target, std::int64_t first_n, std::int64_t first_k) {
  switch (source.dtype) {
    case Dtype::bf16:
      return pack_pairs_from<Bf16>(source, target, first_n, first_k);
    case Dtype::f16:
      return pack_pairs_from<F16>(source, target, first_n, first_k);
    case Dtype::f32:
      return pack_pairs_from<float>(source, target, first_n, first_k);
  }
  return false;
}

}  // namespace quire
