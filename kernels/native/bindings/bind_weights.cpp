#include <nanobind/ndarray.h>
#include <nanobind/operators.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "compute/device.h"
#include "weights/changed_norms.h"
#include "weights/gguf_blocks.h"
#include "weights/mxfp4.h"
#include "weights/packing.h"
#include "weights/quantization.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace quire {
namespace {

using Bytes = nb::ndarray<const std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <class T>
using Matrix = nb::ndarray<const T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

using Memory = nb::ndarray<std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Floats = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

std::size_t block_bytes_of(const QuantizedWeights& target) {
  return static_cast<std::size_t>(target.format.block_bytes(target.k));
}

/// Throws std::invalid_argument unless the target's tiles lie in memory of the device.
template <class Target>
void check_target(Device& device, const Target& target, std::size_t block_bytes, std::int64_t columns,
                  TileRange tiles) {
  std::size_t bytes = 0;
  if (__builtin_mul_overflow(block_bytes, static_cast<std::size_t>(tiles.blocks(columns)), &bytes))
    throw std::invalid_argument("packed weights of k=" + std::to_string(target.k) + " are too large");
  device.check(target.data, bytes);
}

void pack_tiles(Device& device, const MatrixView& source, const PackedWeights& target, std::int64_t first_tile,
                std::int64_t tile_step) {
  check_target(device, target, target.block_bytes(), source.n, {first_tile, tile_step});
  pack(device.threads(), source, target, {first_tile, tile_step});
}

bool pack_matrix_pairs(const MatrixView& source, const Memory& target, const std::string& dtype, std::int64_t pairs,
                       std::int64_t first_n, std::int64_t first_k) {
  const PairTiles tiles{reinterpret_cast<std::byte*>(target.data()), dtype_of(dtype), pairs};
  const bool is_inside =
      first_n >= 0 && first_n <= kMaxInputs && first_k >= 0 && pairs <= kMaxInputs && source.k <= 2 * pairs - first_k;
  if (!is_inside || tiles.bytes(first_n + source.n) > target.nbytes())
    throw std::invalid_argument("a matrix of n=" + std::to_string(source.n) + ", k=" + std::to_string(source.k) +
                                " from " + std::to_string(first_n) + ", " + std::to_string(first_k) + " on, " +
                                std::to_string(pairs) + " pairs, do not fit " + std::to_string(target.nbytes()) +
                                " bytes");
  return pack_pairs(source, tiles, first_n, first_k);
}

nb::ndarray<nb::numpy, float, nb::ndim<1>> norms_of_changed(const MatrixView& weights, const Matrix<float>& b,
                                                            const Matrix<float>& a) {
  const auto n = static_cast<std::size_t>(weights.n), rank = a.shape(0);
  if (b.shape(0) != n || b.shape(1) != rank || a.shape(1) != static_cast<std::size_t>(weights.k))
    throw std::invalid_argument("a change of [" + std::to_string(b.shape(0)) + ", " + std::to_string(b.shape(1)) +
                                "] by [" + std::to_string(rank) + ", " + std::to_string(a.shape(1)) +
                                "] of weights of n=" + std::to_string(n) + ", k=" + std::to_string(weights.k));
  auto norms = std::make_unique<float[]>(n);
  {
    const nb::gil_scoped_release release;
    changed_norms(weights, {a.data(), b.data(), static_cast<std::int64_t>(rank)}, norms.get());
  }
  nb::capsule owner(norms.get(), [](void* memory) noexcept { delete[] static_cast<float*>(memory); });
  return {norms.release(), {n}, owner};
}

void quantize_tiles(Device& device, const MatrixView& source, const QuantizedWeights& target, std::int64_t first_tile,
                    std::int64_t tile_step, const std::optional<Floats>& importance) {
  check_target(device, target, block_bytes_of(target), source.n, {first_tile, tile_step});
  const auto weights = importance ? std::span(importance->data(), importance->size()) : std::span<const float>();
  const nb::gil_scoped_release release;
  quantize(device.threads(), source, weights, target, {first_tile, tile_step});
}

nb::ndarray<nb::numpy, float, nb::ndim<2>> dequantize_rows(const GgufMatrix& source) {
  auto values = std::make_unique<float[]>(static_cast<std::size_t>(source.n * source.k));
  {
    nb::gil_scoped_release release;
    dequantize_gguf(source, values.get());
  }
  nb::capsule owner(values.get(), [](void* memory) noexcept { delete[] static_cast<float*>(memory); });
  return {values.release(), {static_cast<std::size_t>(source.n), static_cast<std::size_t>(source.k)}, owner};
}

void pack_quantized_arrays(Device& device, const Matrix<std::uint8_t>& values, const Matrix<float>& scales,
                           const std::optional<Matrix<std::int16_t>>& zeros, const QuantizedWeights& target,
                           std::int64_t first_tile, std::int64_t tile_step) {
  const auto n = static_cast<std::int64_t>(values.shape(0)), k = static_cast<std::int64_t>(values.shape(1));
  const auto groups = static_cast<std::size_t>(target.format.groups(k));
  const auto fits = [&](const auto& array) { return array.shape(0) == values.shape(0) && array.shape(1) == groups; };
  if (!fits(scales) || (zeros && !fits(*zeros)))
    throw std::invalid_argument("scales and zeros must have shape [" + std::to_string(n) + ", " +
                                std::to_string(groups) + "]: a row for each row of values, a column for each group");
  check_target(device, target, block_bytes_of(target), n, {first_tile, tile_step});
  const QuantizedView source{values.data(), scales.data(), zeros ? zeros->data() : nullptr, n, k};
  const nb::gil_scoped_release release;
  pack_quantized(device.threads(), source, target, {first_tile, tile_step});
}

const std::array<std::pair<const char*, GroupScale>, 3> kScales = {
    {{"f16", GroupScale::f16}, {"e8m0", GroupScale::e8m0}, {"super", GroupScale::super}}};
const std::array<std::pair<const char*, Codebook>, 3> kCodebooks = {
    {{"", Codebook::none}, {"iq4nl", Codebook::iq4nl}, {"e2m1", Codebook::e2m1}}};

template <class T>
T by_name(const std::array<std::pair<const char*, T>, 3>& names, const std::string& name) {
  for (const auto& [known, value] : names)
    if (name == known) return value;
  throw std::invalid_argument("there is no '" + name + "' among the scales or codebooks of quantized weights");
}

template <class T>
const char* name_of(const std::array<std::pair<const char*, T>, 3>& names, T value) {
  return std::ranges::find(names, value, &std::pair<const char*, T>::second)->first;
}

std::string repr(const QuantizedFormat& format) {
  std::string text = "QuantizedFormat(bits=" + std::to_string(format.bits) + ", group=" + std::to_string(format.group) +
                     ", zeros=" + (format.zeros ? "True" : "False");
  if (format.scale != GroupScale::f16) text += std::string(", scales='") + name_of(kScales, format.scale) + "'";
  if (format.mins) text += ", mins=True";
  if (format.codebook != Codebook::none)
    text += std::string(", codebook='") + name_of(kCodebooks, format.codebook) + "'";
  if (format.rotated) text += ", rotated=True";
  return text + ")";
}

std::vector<int> codebook_values(const QuantizedFormat& format) {
  if (format.codebook == Codebook::none) return {};
  const auto& values = format.codebook == Codebook::iq4nl ? kIq4Nl : kE2M1;
  return {values.begin(), values.end()};
}

void bind_quantized_format(nb::module_& m) {
  nb::class_<QuantizedFormat>(
      m, "QuantizedFormat",
      "Format of quantized weights: `bits` of a stored value; `group` elements of k share a scale, 0 for the whole "
      "column; with `zeros` each group has its own zero point, otherwise it is `middle`.\n\n"
      "The scales of whole columns are f32, those of groups `scales`: f16, e8m0 (powers of two), or super, a signed "
      "byte "
      "times an f16 of 256 elements. With `mins` each group has a minimum, stored alike, which is subtracted. Values "
      "of "
      "4 bits may be numbers of the values of a `codebook`: iq4nl or e2m1. The values of groups that are `rotated` are "
      "those of their Hadamard transforms.")
      .def(
          "__init__",
          [](QuantizedFormat* self, int bits, std::int64_t group, bool zeros, const std::string& scales, bool mins,
             const std::string& codebook, bool rotated) {
            const QuantizedFormat format{
                bits, group, zeros, by_name(kScales, scales), mins, by_name(kCodebooks, codebook), rotated};
            format.check();
            new (self) QuantizedFormat(format);
          },
          "bits"_a, "group"_a = 0, "zeros"_a = false, "scales"_a = "f16", "mins"_a = false, "codebook"_a = "",
          "rotated"_a = false)
      .def_static(
          "of_gguf", [](const std::string& type) { return gguf_type(type).format; }, "type"_a,
          "Return the format that keeps the bits of a GGUF type.")
      .def_ro("bits", &QuantizedFormat::bits)
      .def_ro("group", &QuantizedFormat::group)
      .def_ro("zeros", &QuantizedFormat::zeros)
      .def_ro("mins", &QuantizedFormat::mins)
      .def_ro("rotated", &QuantizedFormat::rotated)
      .def_prop_ro("scales", [](const QuantizedFormat& format) { return name_of(kScales, format.scale); })
      .def_prop_ro("codebook", &codebook_values, "Values of the 16 codes, unsigned; empty if values are themselves.")
      .def_prop_ro("middle", &QuantizedFormat::middle, "The value that stands for 0 without zero points.")
      .def_prop_ro("largest", &QuantizedFormat::largest, "The largest value, after the codebook.")
      .def_prop_ro(
          "planes",
          [](const QuantizedFormat& format) {
            return std::vector<int>(format.planes().begin(), format.planes().end());
          },
          "Bits of a value, lowest first, as they are stored together.")
      .def_prop_ro("super_groups", &QuantizedFormat::super_groups,
                   "Number of groups whose scales are stored together, before their values.")
      .def_prop_ro("header_bytes", &QuantizedFormat::header_bytes,
                   "Bytes of the scales, zero points and minima of `super_groups` groups.")
      .def_prop_ro("activation_group", &QuantizedFormat::activation_group,
                   "Number of elements of k of quantized activations that share a scale, 0 for all.")
      .def_prop_ro("activation_words", &QuantizedFormat::activation_words,
                   "Words of a row in a group of activations: scale, sum, and in groups of 32 that of its first half.")
      .def("span", &QuantizedFormat::span, "k"_a, "Return the number of elements of k that share a scale.")
      .def("depth", &QuantizedFormat::depth, "k"_a,
           "Return k as quantized activations hold it: whole groups and whole lines.")
      .def("groups", &QuantizedFormat::groups, "k"_a, "Return the number of groups along k; the last may be padded.")
      .def("activation_groups", &QuantizedFormat::activation_groups, "k"_a,
           "Return the number of groups of activations along k; the last may be padded.")
      .def("value_bytes", &QuantizedFormat::value_bytes, "k"_a, "Return the bytes of a group's values of 32 columns.")
      .def("super_bytes", &QuantizedFormat::super_bytes, "k"_a,
           "Return the bytes of `super_groups` groups of 32 columns.")
      .def("block_bytes", &QuantizedFormat::block_bytes, "k"_a, "Return the bytes of 32 columns.")
      .def("panel_bytes", &QuantizedFormat::panel_bytes, "k"_a, "Return the bytes of 16 rows of quantized activations.")
      .def(nb::self == nb::self, nb::sig("def __eq__(self, other: object, /) -> bool"))
      .def("__hash__", [](const QuantizedFormat& format) { return nb::hash(nb::str(repr(format).c_str())); })
      .def("__repr__", &repr);
}

/// Packs rows of a matrix in blocks, by `pack`.
template <auto pack, class Source>
void pack_rows(Device& device, const Source& source, const QuantizedWeights& target, std::int64_t first,
               std::int64_t count, std::int64_t first_tile, std::int64_t tile_step) {
  check_target(device, target, block_bytes_of(target), std::max<std::int64_t>(count, 1), {first_tile, tile_step});
  pack(device.threads(), source, first, count, target, {first_tile, tile_step});
}

}  // namespace

void bind_weights(nb::module_& m) {
  bind_quantized_format(m);
  nb::class_<MatrixView>(m, "MatrixView", "A matrix w[n, k] of a checkpoint in the bytes `data`; strides in elements.")
      .def(
          "__init__",
          [](MatrixView* self, const Bytes& data, const std::string& dtype, std::int64_t n, std::int64_t k,
             std::int64_t n_stride, std::int64_t k_stride) {
            (new (self) MatrixView{data.data(), dtype_of(dtype), n, k, n_stride, k_stride})->check(data.nbytes());
          },
          "data"_a, "dtype"_a, "n"_a, "k"_a, "n_stride"_a, "k_stride"_a, nb::keep_alive<1, 2>())
      .def("pack_pairs", &pack_matrix_pairs, "target"_a, "dtype"_a, "pairs"_a, "first_n"_a = 0, "first_k"_a = 0,
           nb::call_guard<nb::gil_scoped_release>(),
           "Pack the matrix of an adapter, bf16 or f32, into tiles of 16 n by `pairs` of k, from w[first_n, first_k] "
           "on. Return False if an element is infinite or no number then.")
      .def("changed_norms", &norms_of_changed, "b"_a, "a"_a,
           "Return the norms of the rows of w + b a, f32 [n], of a change b [n, rank], a [rank, k].");
  nb::class_<GgufMatrix>(m, "GgufMatrix",
                         "A matrix w[n, k] in the blocks of a GGUF type, in the bytes `data`. Rows 2 j and 2 j + 1 of "
                         "each of `heads` stand for its rows j and j + size / 2.")
      .def(
          "__init__",
          [](GgufMatrix* self, const Bytes& data, const std::string& type, std::int64_t n, std::int64_t k,
             std::int64_t heads) {
            (new (self) GgufMatrix{data.data(), &gguf_type(type), n, k, heads})->check(data.nbytes());
          },
          "data"_a, "type"_a, "n"_a, "k"_a, "heads"_a = 0, nb::keep_alive<1, 2>())
      .def("dequantize", &dequantize_rows, "Return the values, f32 [n, k]. Raises ValueError for a damaged scale.");
  nb::class_<Mxfp4Matrix>(
      m, "Mxfp4Matrix",
      "A matrix w[n, k] in MXFP4 as gpt-oss stores it: bytes of two `codes`, and apart from them an "
      "exponent for each 32 of k. Strides are in bytes.")
      .def(
          "__init__",
          [](Mxfp4Matrix* self, const Bytes& codes, const Bytes& scales, std::int64_t n, std::int64_t k,
             std::int64_t code_stride, std::int64_t scale_stride) {
            const Mxfp4Matrix matrix{codes.data(), scales.data(), n, k, code_stride, scale_stride};
            matrix.check(codes.nbytes(), scales.nbytes());
            new (self) Mxfp4Matrix(matrix);
          },
          "codes"_a, "scales"_a, "n"_a, "k"_a, "code_stride"_a, "scale_stride"_a, nb::keep_alive<1, 2>(),
          nb::keep_alive<1, 3>());
  nb::class_<PackedWeights>(m, "PackedWeights", "Memory of packed weights of `k` inputs, in bf16, bf16-paired or f32.")
      .def(
          "__init__",
          [](PackedWeights* self, Address address, const std::string& storage, std::int64_t k) {
            new (self) PackedWeights(reinterpret_cast<std::byte*>(address), storage, k);
          },
          "address"_a, "storage"_a, "k"_a);
  nb::class_<QuantizedWeights>(m, "QuantizedWeights", "Memory of packed quantized weights of `k` inputs.")
      .def(
          "__init__",
          [](QuantizedWeights* self, Address address, const QuantizedFormat& format, std::int64_t k) {
            new (self) QuantizedWeights{reinterpret_cast<std::byte*>(address), format, k};
          },
          "address"_a, "format"_a, "k"_a);
}

void bind_packing(nb::class_<Device>& device) {
  device
      .def("pack", &pack_tiles, "source"_a, "target"_a, "first_tile"_a = 0, "tile_step"_a = 1,
           nb::call_guard<nb::gil_scoped_release>(),
           "Pack the matrix into every `tile_step`-th tile of 16 columns, from `first_tile` on.")
      .def(
          "quantize", &quantize_tiles, "source"_a, "target"_a, "first_tile"_a = 0, "tile_step"_a = 1,
          "importance"_a = nb::none(),
          "Quantize the matrix and pack it, as `pack` does. Squared errors are weighted by the importance [k] of their "
          "inputs.")
      .def("pack_blocks", &pack_rows<&pack_gguf, GgufMatrix>, "source"_a, "target"_a, "first"_a, "count"_a,
           "first_tile"_a = 0, "tile_step"_a = 1, nb::call_guard<nb::gil_scoped_release>(),
           "Pack `count` rows of the matrix from number `first` on, as `pack` does.")
      .def("pack_blocks", &pack_rows<&pack_mxfp4, Mxfp4Matrix>, "source"_a, "target"_a, "first"_a, "count"_a,
           "first_tile"_a = 0, "tile_step"_a = 1, nb::call_guard<nb::gil_scoped_release>(),
           "Pack `count` rows of the matrix from number `first` on, as `pack` does.")
      .def("pack_quantized", &pack_quantized_arrays, "values"_a, "scales"_a, "zeros"_a.none(), "target"_a,
           "first_tile"_a = 0, "tile_step"_a = 1, "Pack a quantized matrix, as `pack` does.");
}

}  // namespace quire
