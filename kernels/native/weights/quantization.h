#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "compute/abi.h"
#include "compute/thread_pool.h"
#include "weights/packing.h"

namespace quire {

/// How the scales of groups are stored.
enum class GroupScale {
  f16,
  e8m0,  ///< a byte: the exponent of a power of two
  super  ///< a signed byte, times the f16 scale of kSuperGroup elements of k
};

/// What stored values stand for: themselves, or the entries of a table (see gguf_blocks.h for its source).
enum class Codebook { none, iq4nl, e2m1 };

inline constexpr std::int64_t kSuperGroup = 256;  ///< elements of k that share the scale of scales
inline constexpr std::int64_t kPlaneUnit = 32;    ///< elements of k whose bits are stored together
inline constexpr std::int64_t kMaxRotated = 256;  ///< most elements of k of a rotated group

/// Values of the 4-bit codes of a codebook, made unsigned by its `middle`.
inline constexpr std::array<std::uint8_t, 16> kIq4Nl = {1,   24,  45,  63,  79,  93,  106, 118,
                                                        129, 141, 153, 166, 181, 197, 217, 241};
inline constexpr std::array<std::uint8_t, 16> kE2M1 = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

/// The format of quantized weights, and of the activations that they are multiplied with (layout: emit/layout.py). The
/// scales of whole columns are f32.
struct QuantizedFormat {
  int bits;                ///< bits of a stored value: 2 to 6, or 8
  std::int64_t group = 0;  ///< elements of k that share a scale; 0: the whole column
  bool zeros = false;      ///< each group has its own zero point; otherwise it is `middle`
  GroupScale scale = GroupScale::f16;
  bool mins = false;  ///< each group has a minimum, stored as its scale is, which is subtracted from scale * value
  Codebook codebook = Codebook::none;
  bool rotated = false;  ///< values are those of the Hadamard transform of each group

  bool operator==(const QuantizedFormat&) const = default;

  /// Throws std::invalid_argument unless the fields go together and `group` is 16 or a multiple of 32 up to kMaxInputs.
  void check() const;

  // The functions of k throw std::invalid_argument unless k is from 1 to kMaxInputs.

  std::int64_t middle() const;          ///< value that stands for 0 where there are no zero points
  std::int64_t largest() const;         ///< largest value, that of the codebook if there is one
  std::span<const int> planes() const;  ///< bits of a value that each plane stores, lowest first

  std::int64_t span(std::int64_t k) const;    ///< elements of k that share a scale
  std::int64_t depth(std::int64_t k) const;   ///< k as quantized activations hold it: whole groups and whole lines
  std::int64_t groups(std::int64_t k) const;  ///< groups of a column, of which the last ones may be padded

  std::int64_t super_groups() const;  ///< groups whose scales are stored together, before their values
  std::int64_t header_bytes() const;  ///< bytes of the scales, zero points and minima of `super_groups` groups
  /// Bytes of the values of a group, in 32 columns.
  std::int64_t value_bytes(std::int64_t k) const { return span(k) * kPackedBlock * bits / 8; }
  std::int64_t super_bytes(std::int64_t k) const { return header_bytes() + super_groups() * value_bytes(k); }
  std::int64_t block_bytes(std::int64_t k) const;  ///< bytes of 32 columns; the last header may have fewer groups

  std::int64_t activation_group() const { return group == 16 ? 32 : group; }  ///< the `group` of activations
  std::int64_t activation_groups(std::int64_t k) const;
  /// Words of a group of activations: scale, sum, and in groups of 32 the sum of the first 16 elements.
  std::int64_t activation_words() const;
  std::int64_t panel_bytes(std::int64_t k) const;  ///< bytes of 16 rows of quantized activations
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

/// Quantizes `source` and packs it into `tiles` of `target`. 8 bits without minima: scale = max |w| / 127. With minima:
/// the least sum of squared errors that a search finds for each group, weighted by the `importance` of their inputs,
/// f32 [k], or unweighted if that is empty. The same bits on every host. Throws as `pack_quantized` does, for a weight
/// that is not finite, and if `importance` does not fit.
void quantize(ThreadPool& pool, const MatrixView& source, std::span<const float> importance,
              const QuantizedWeights& target, TileRange tiles);

}  // namespace quire
