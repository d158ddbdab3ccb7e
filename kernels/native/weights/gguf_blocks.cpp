#include "weights/gguf_blocks.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <stdexcept>

#include "weights/quantized_tile.h"

namespace quire {
namespace {

// Source of all layouts: ggml-common.h and ggml-quants.c of ggml. A block has its f16 scale, d, before or after the
// values; some have a minimum too. `m` of Q4_1 and Q5_1 is added in ggml and subtracted here.

constexpr std::uint16_t kSign = 0x8000;
constexpr int kHalvedBias = 128;  // bias of the exponents of e8m0, for values that are twice those of e2m1

std::uint16_t f16_at(const std::uint8_t* bytes) {
  std::uint16_t bits;
  std::memcpy(&bits, bytes, sizeof bits);
  if ((bits & 0x7c00u) == 0x7c00u) throw std::invalid_argument("a scale is an infinity or a NaN");
  return bits;
}

struct Column {
  Column(QuantizedTile& tile, std::int64_t n, std::int64_t block, std::int64_t elements)
      : values(tile.column(n) + block * elements),
        first(n * tile.groups + (tile.format.group == elements ? block : block * (elements / tile.format.group))),
        super(n * tile.groups / tile.format.super_groups() + block),
        tile(tile) {}

  void set_scale(const std::uint8_t* d) { tile.scales[first] = from_f16(f16_at(d)); }
  void set_super(const std::uint8_t* d) { tile.supers[2 * super] = f16_at(d); }
  void set_super_min(const std::uint8_t* d) { tile.supers[2 * super + 1] = f16_at(d); }
  std::uint8_t& sub_scale(std::int64_t g) { return tile.sub_scales[first + g]; }
  std::uint8_t& sub_min(std::int64_t g) { return tile.sub_mins[first + g]; }

  std::uint8_t* values;
  std::int64_t first;  ///< index of the block's first group in the tile
  std::int64_t super;
  QuantizedTile& tile;
};

/// Writes the low halves of 16 bytes, then the high ones.
void nibbles(const std::uint8_t* bytes, std::uint8_t* values, std::int64_t count = 16) {
  for (std::int64_t i = 0; i < count; i++) {
    values[i] = bytes[i] & 15;
    values[count + i] = bytes[i] >> 4;
  }
}

void fifth_bits(const std::uint8_t* bytes, std::uint8_t* values) {
  for (int i = 0; i < 32; i++) values[i] |= static_cast<std::uint8_t>((bytes[i / 8] >> i % 8 & 1) << 4);
}

void q8_0(const std::uint8_t* bytes, std::int64_t block, QuantizedTile& tile, std::int64_t n) {
  Column column(tile, n, block, 32);
  column.set_scale(bytes);
  for (int i = 0; i < 32; i++) column.values[i] = bytes[2 + i] ^ 128;
}

void q4_0(const std::uint8_t* bytes, std::int64_t block, QuantizedTile& tile, std::int64_t n) {
  Column column(tile, n, block, 32);
  column.set_scale(bytes);
  nibbles(bytes + 2, column.values);
}

void q4_1(const std::uint8_t* bytes, std::int64_t block, QuantizedTile& tile, std::int64_t n) {
  Column column(tile, n, block, 32);
  column.set_scale(bytes);
  tile.min_bits[column.first] = f16_at(bytes + 2) ^ kSign;
  nibbles(bytes + 4, column.values);
}

void q5_0(const std::uint8_t* bytes, std::int64_t block, QuantizedTile& tile, std::int64_t n) {
  Column column(tile, n, block, 32);
  column.set_scale(bytes);
  nibbles(bytes + 6, column.values);
  fifth_bits(bytes + 2, column.values);
}

void q5_1(const std::uint8_t* bytes, std::int64_t block, QuantizedTile& tile, std::int64_t n) {
  Column column(tile, n, block, 32);
  column.set_scale(bytes);
  tile.min_bits[column.first] = f16_at(bytes + 2) ^ kSign;
  nibbles(bytes + 8, column.values);
  fifth_bits(bytes + 4, column.values);
}

void mxfp4(const std::uint8_t* bytes, std::int64_t block, QuantizedTile& tile, std::int64_t n) {
  Column column(tile, n, block, 32);
  if (bytes[0] == 255) throw std::invalid_argument("a scale is a NaN");
  column.sub_scale(0) = bytes[0];
  nibbles(bytes + 1, column.values);
}

/// The order of the elements of Q2_K and Q3_K, of 128 each: byte l of 32 has those of l, l + 32, l + 64 and l + 96.
void pairs_of_bits(const std::uint8_t* bytes, std::uint8_t* values) {
  for (int half = 0; half < 2; half++)
    for (int i = 0; i < 4; i++)
      for (int l = 0; l < 32; l++) values[half * 128 + i * 32 + l] = bytes[half * 32 + l] >> 2 * i & 3;
}

void q2_k(const std::uint8_t* bytes, std::int64_t block, QuantizedTile& tile, std::int64_t n) {
  Column column(tile, n, block, kSuperGroup);
  for (int g = 0; g < 16; g++) {
    column.sub_scale(g) = bytes[g] & 15;
    column.sub_min(g) = bytes[g] >> 4;
  }
  pairs_of_bits(bytes + 16, column.values);
  column.set_super(bytes + 80);
  column.set_super_min(bytes + 82);
}

void q3_k(const std::uint8_t* bytes, std::int64_t block, QuantizedTile& tile, std::int64_t n) {
  Column column(tile, n, block, kSuperGroup);
  const std::uint8_t* scales = bytes + 96;
  pairs_of_bits(bytes + 32, column.values);
  for (int i = 0; i < 8; i++)
    for (int l = 0; l < 32; l++) column.values[i * 32 + l] |= static_cast<std::uint8_t>((bytes[l] >> i & 1) << 2);
  for (int g = 0; g < 16; g++) {
    const int low = g < 8 ? scales[g] & 15 : scales[g - 8] >> 4, high = scales[8 + g % 4] >> 2 * (g / 4) & 3;
    column.sub_scale(g) = static_cast<std::uint8_t>((low | high << 4) - 32);
  }
  column.set_super(bytes + 108);
}

/// Writes the eight scales and minima, of 6 bits each, of Q4_K and Q5_K.
void six_bits(const std::uint8_t* bytes, Column& column) {
  for (int g = 0; g < 4; g++) {
    column.sub_scale(g) = bytes[g] & 63;
    column.sub_min(g) = bytes[g + 4] & 63;
    column.sub_scale(g + 4) = static_cast<std::uint8_t>((bytes[g + 8] & 15) | bytes[g] >> 6 << 4);
    column.sub_min(g + 4) = static_cast<std::uint8_t>(bytes[g + 8] >> 4 | bytes[g + 4] >> 6 << 4);
  }
}

void q4_k(const std::uint8_t* bytes, std::int64_t block, QuantizedTile& tile, std::int64_t n) {
  Column column(tile, n, block, kSuperGroup);
  column.set_super(bytes);
  column.set_super_min(bytes + 2);
  six_bits(bytes + 4, column);
  for (int i = 0; i < 4; i++) nibbles(bytes + 16 + i * 32, column.values + i * 64, 32);
}

void q5_k(const std::uint8_t* bytes, std::int64_t block, QuantizedTile& tile, std::int64_t n) {
  Column column(tile, n, block, kSuperGroup);
  column.set_super(bytes);
  column.set_super_min(bytes + 2);
  six_bits(bytes + 4, column);
  for (int i = 0; i < 4; i++) nibbles(bytes + 48 + i * 32, column.values + i * 64, 32);
  for (int i = 0; i < 8; i++)
    for (int l = 0; l < 32; l++) column.values[i * 32 + l] |= static_cast<std::uint8_t>((bytes[16 + l] >> i & 1) << 4);
}

void q6_k(const std::uint8_t* bytes, std::int64_t block, QuantizedTile& tile, std::int64_t n) {
  Column column(tile, n, block, kSuperGroup);
  for (int half = 0; half < 2; half++) {
    const std::uint8_t *low = bytes + half * 64, *high = bytes + 128 + half * 32;
    std::uint8_t* values = column.values + half * 128;
    nibbles(low, values, 32);            // elements 0 to 31, and for now 64 to 95
    nibbles(low + 32, values + 64, 32);  // 32 to 63 and 96 to 127
    std::swap_ranges(values + 32, values + 64, values + 64);
    for (int i = 0; i < 4; i++)
      for (int l = 0; l < 32; l++) values[i * 32 + l] |= static_cast<std::uint8_t>((high[l] >> 2 * i & 3) << 4);
  }
  for (int g = 0; g < 16; g++) column.sub_scale(g) = bytes[192 + g];
  column.set_super(bytes + 208);
}

void iq4_xs(const std::uint8_t* bytes, std::int64_t block, QuantizedTile& tile, std::int64_t n) {
  Column column(tile, n, block, kSuperGroup);
  column.set_super(bytes);
  for (int g = 0; g < 8; g++) {
    const int low = bytes[4 + g / 2] >> 4 * (g % 2) & 15, high = (bytes[2 + g / 4] >> 2 * (g % 4)) & 3;
    column.sub_scale(g) = static_cast<std::uint8_t>((low | high << 4) - 32);
    nibbles(bytes + 8 + g * 16, column.values + g * 32);
  }
}

constexpr QuantizedFormat grouped(int bits, bool mins = false, Codebook codebook = Codebook::none) {
  return {.bits = bits, .group = 32, .mins = mins, .codebook = codebook};
}

constexpr QuantizedFormat super(int bits, std::int64_t group, bool mins = false, Codebook codebook = Codebook::none) {
  return {.bits = bits, .group = group, .scale = GroupScale::super, .mins = mins, .codebook = codebook};
}

constexpr std::array<GgufType, 13> kTypes = {{
    {"Q8_0", grouped(8), 32, 34, q8_0},
    {"Q4_0", grouped(4), 32, 18, q4_0},
    {"Q4_1", grouped(4, true), 32, 20, q4_1},
    {"Q5_0", grouped(5), 32, 22, q5_0},
    {"Q5_1", grouped(5, true), 32, 24, q5_1},
    {"Q2_K", super(2, 16, true), 256, 84, q2_k},
    {"Q3_K", super(3, 16), 256, 110, q3_k},
    {"Q4_K", super(4, 32, true), 256, 144, q4_k},
    {"Q5_K", super(5, 32, true), 256, 176, q5_k},
    {"Q6_K", super(6, 16), 256, 210, q6_k},
    {"IQ4_NL", grouped(4, false, Codebook::iq4nl), 32, 18, q4_0},
    {"IQ4_XS", super(4, 32, false, Codebook::iq4nl), 256, 136, iq4_xs},
    {"MXFP4", {.bits = 4, .group = 32, .scale = GroupScale::e8m0, .codebook = Codebook::e2m1}, 32, 17, mxfp4},
}};

/// Writes the values of the first column of a tile.
void dequantize(const QuantizedTile& tile, float* target) {
  const QuantizedFormat& format = tile.format;
  const std::uint8_t* table = format.codebook == Codebook::iq4nl ? kIq4Nl.data() : kE2M1.data();
  const bool has_codes = format.codebook != Codebook::none;
  const std::int64_t span = format.span(tile.k), step = format.super_groups();
  for (std::int64_t g = 0; g < tile.groups; g++) {
    float scale = tile.scales[g], min = from_f16(tile.min_bits[g]);
    if (format.scale == GroupScale::super) {
      scale = from_f16(tile.supers[g / step * 2]) * static_cast<float>(static_cast<std::int8_t>(tile.sub_scales[g]));
      min = from_f16(tile.supers[g / step * 2 + 1]) * static_cast<float>(tile.sub_mins[g]);
    } else if (format.scale == GroupScale::e8m0) {
      scale = std::ldexp(1.0f, tile.sub_scales[g] - kHalvedBias);
    }
    for (std::int64_t i = g * span; i < (g + 1) * span; i++) {
      const int value = has_codes ? table[tile.values[i]] : tile.values[i];
      target[i] = scale * static_cast<float>(value - format.middle()) - min;
    }
  }
}

}  // namespace

const GgufType& gguf_type(const std::string& name) {
  const auto* found = std::ranges::find_if(kTypes, [&](const GgufType& type) { return name == type.name; });
  if (found == kTypes.end()) throw std::invalid_argument("there is no quantized GGUF type " + name);
  return *found;
}

void GgufMatrix::check(std::size_t bytes) const {
  const bool has_blocks = n >= 1 && k >= 1 && k <= kMaxInputs && k % type->elements == 0;
  const bool has_heads = heads == 0 || (heads >= 1 && n % (2 * heads) == 0);
  if (!has_blocks || !has_heads || static_cast<__int128>(n) * (k / type->elements) * type->bytes > bytes)
    throw std::invalid_argument("a matrix of type " + std::string(type->name) + " of n=" + std::to_string(n) +
                                ", k=" + std::to_string(k) + " and " + std::to_string(heads) +
                                " heads has no whole blocks and heads, or does not fit " + std::to_string(bytes) +
                                " bytes");
}

const std::uint8_t* GgufMatrix::row(std::int64_t n_) const {
  if (heads) {
    const std::int64_t size = n / heads, i = n_ % size;
    n_ += (i < size / 2 ? 2 * i : 2 * i - size + 1) - i;
  }
  return data + n_ * (k / type->elements) * type->bytes;
}

void pack_gguf(ThreadPool& pool, const GgufMatrix& source, std::int64_t first, std::int64_t count,
               const QuantizedWeights& target, TileRange tiles) {
  check_fits(source.k, count, target);
  if (!(source.type->format == target.format) || first < 0 || first + count > source.n)
    throw std::invalid_argument("rows " + std::to_string(first) + " to " + std::to_string(first + count - 1) + " of " +
                                std::to_string(source.n) + " of type " + source.type->name +
                                " do not fit packed weights of another format");
  for_each_tile(pool, count, target, tiles, [&](QuantizedTile& tile, std::int64_t n, std::int64_t column) {
    const std::uint8_t* bytes = source.row(first + n);
    for (std::int64_t block = 0; block < source.k / source.type->elements; block++, bytes += source.type->bytes)
      source.type->decode(bytes, block, tile, column);
  });
}

void dequantize_gguf(const GgufMatrix& source, float* target) {
  QuantizedTile tile(source.type->format, source.k);
  for (std::int64_t n = 0; n < source.n; n++) {
    const std::uint8_t* bytes = source.row(n);
    for (std::int64_t block = 0; block < source.k / source.type->elements; block++, bytes += source.type->bytes)
      source.type->decode(bytes, block, tile, 0);
    dequantize(tile, target + n * source.k);
  }
}

}  // namespace quire
