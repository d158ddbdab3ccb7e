#include <algorithm>
#include <bit>
#include <stdexcept>
#include <string>

#include "weights/quantization.h"

namespace quire {
namespace {

std::int64_t round_up(std::int64_t value, std::int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

std::int64_t checked_inputs(std::int64_t k) {
  if (k < 1 || k > kMaxInputs)
    throw std::invalid_argument("k=" + std::to_string(k) + " inputs; give 1 to " + std::to_string(kMaxInputs));
  return k;
}

constexpr std::array kPlanes2{2}, kPlanes4{4}, kPlanes8{8};
constexpr std::array kPlanes3{2, 1}, kPlanes5{4, 1}, kPlanes6{4, 2};

}  // namespace

void QuantizedFormat::check() const {
  const bool is_group = group == 16 || (group >= 0 && group <= kMaxInputs && group % 32 == 0);
  if (bits < 2 || bits > 8 || bits == 7 || !is_group)
    throw std::invalid_argument("quantized weights of " + std::to_string(bits) + " bits in groups of " +
                                std::to_string(group) +
                                " are not supported; give 2 to 6 or 8 bits, and a group of 0, 16 or a multiple of 32");
  if (rotated && (group < 32 || group > kMaxRotated || !std::has_single_bit(static_cast<std::uint64_t>(group))))
    throw std::invalid_argument("groups of " + std::to_string(group) +
                                " can't be rotated; give a power of two from 32 to " + std::to_string(kMaxRotated));
  if (codebook != Codebook::none && bits != 4) throw std::invalid_argument("codes of a codebook have 4 bits");
  if (mins && (zeros || codebook != Codebook::none || !group || scale == GroupScale::e8m0))
    throw std::invalid_argument(
        "minima go with groups whose scales are f16 or super, without zero points or a codebook");
  if (scale == GroupScale::super && (zeros || !group || kSuperGroup % group))
    throw std::invalid_argument("super scales go with groups that divide " + std::to_string(kSuperGroup) +
                                ", without zero points");
  if (scale == GroupScale::e8m0 && (zeros || group != 32))
    throw std::invalid_argument("scales of a byte go with groups of 32, without zero points");
}

std::int64_t QuantizedFormat::middle() const {
  if (codebook == Codebook::iq4nl) return 128;
  if (codebook == Codebook::e2m1) return 12;
  return mins ? 0 : std::int64_t{1} << (bits - 1);
}

std::int64_t QuantizedFormat::largest() const {
  if (codebook == Codebook::iq4nl) return *std::ranges::max_element(kIq4Nl);
  if (codebook == Codebook::e2m1) return *std::ranges::max_element(kE2M1);
  return (std::int64_t{1} << bits) - 1;
}

std::span<const int> QuantizedFormat::planes() const {
  switch (bits) {
    case 2:
      return kPlanes2;
    case 3:
      return kPlanes3;
    case 4:
      return kPlanes4;
    case 5:
      return kPlanes5;
    case 6:
      return kPlanes6;
    default:
      return kPlanes8;
  }
}

std::int64_t QuantizedFormat::span(std::int64_t k) const {
  checked_inputs(k);
  return group ? group : round_up(k, 64);
}

std::int64_t QuantizedFormat::depth(std::int64_t k) const {
  return round_up(checked_inputs(k), std::max<std::int64_t>(64, group));
}

std::int64_t QuantizedFormat::groups(std::int64_t k) const {
  return round_up((k + span(k) - 1) / span(k), group == 16 || scale == GroupScale::e8m0 ? 2 : 1);
}

std::int64_t QuantizedFormat::super_groups() const {
  if (scale == GroupScale::super) return kSuperGroup / group;
  return scale == GroupScale::e8m0 ? 2 : 1;  // two fill a cache line
}

std::int64_t QuantizedFormat::header_bytes() const {
  const std::int64_t halves = 2 * kPackedBlock, bytes = super_groups() * kPackedBlock;
  if (!group) return 2 * halves + (zeros ? halves : 0);
  if (scale == GroupScale::e8m0) return bytes;
  return (scale == GroupScale::super ? halves + bytes : halves) * (mins ? 2 : 1) + (zeros ? halves : 0);
}

std::int64_t QuantizedFormat::block_bytes(std::int64_t k) const {
  const std::int64_t left = groups(k) % super_groups();
  return groups(k) / super_groups() * super_bytes(k) + (left ? header_bytes() + left * value_bytes(k) : 0);
}

std::int64_t QuantizedFormat::activation_groups(std::int64_t k) const {
  const std::int64_t size = activation_group();
  return size && size <= 32 ? depth(k) / size : (k + span(k) - 1) / span(k);
}

std::int64_t QuantizedFormat::activation_words() const {
  return activation_group() && activation_group() <= 32 ? 3 : 2;
}

std::int64_t QuantizedFormat::panel_bytes(std::int64_t k) const {
  return kTileRows * (depth(k) + activation_groups(k) * activation_words() * 4);
}

}  // namespace quire
