"""compressed-tensors, the format of llm-compressor (version 0.20 of its sources).

For a module with `n` outputs and `k` inputs, "pack-quantized" has `weight_packed` i32 [n, k * bits / 32], packed along
k, each value plus 2^(bits - 1); `weight_scale` [n, groups]; `weight_shape` i64 [2]; if asymmetric `weight_zero_point`
i32 [n * bits / 32, groups], packed along n with the same offset; and in an older act-order
`weight_g_idx` i32 [k], the group of each input. "int-quantized" has `weight` i8 [n, k], `weight_scale` [n, groups] and
`weight_zero_point` i8 [n, groups].
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from quire.kernels.config import ModelConfig
from quire.kernels.emit.layout import QuantizedFormat
from quire.kernels.errors import ModelError
from quire.kernels.weights.checkpoint import Checkpoint, Tensor, stored_names
from quire.kernels.weights.quantized.scheme import (
    BITS,
    GROUPS,
    WHOLE_ROW,
    Bytes,
    Floats,
    Layer,
    Scheme,
    order_of,
    unpack,
    unpack_transposed,
    words_for,
)

_STORED = ("pack-quantized", "int-quantized")
_EMBEDDINGS = ("embed_tokens", "wte", "wpe")
_CLASSES = ("Linear", "Embedding")


def _layer_of(section: ModelConfig, stored: str | None) -> Layer:
    """Read a config group; act-order is by `weight_g_idx`."""
    stored = section.choice("format", _STORED, stored)
    _check_activations(section)
    weights = section.section("weights")
    weights.restrict("type", ("int",))
    weights.restrict("dynamic", (False,))
    weights.restrict("block_structure")
    weights.restrict("actorder", (False, "weight", "static", "group", "dynamic"))
    bits, group = weights.choice("num_bits", BITS, 8), _group_size(weights)
    reordered = weights.fields.get("actorder") in ("group", "dynamic") and group > 0
    format_ = QuantizedFormat(bits, group, zeros=not weights.get("symmetric", True))
    return Layer(format_, reordered, stored == "pack-quantized")


def _check_activations(section: ModelConfig) -> None:
    """Reject unsupported quantization of activations; dynamic int8 is up to the kernels."""
    section.restrict("output_activations")
    inputs = section.section("input_activations")
    if inputs.fields:
        inputs.restrict("type", ("int",))
        inputs.choice("num_bits", (8,), 8)
        if inputs.fields.get("dynamic") is not True:
            raise ModelError(
                f"config.json: {inputs.path}dynamic is {inputs.fields.get('dynamic')!r}; it must be True: "
                "static scales of activations are not supported"
            )


def _group_size(weights: ModelConfig) -> int:
    """Return the number of elements that share a scale, 0 for a whole channel; infer an absent strategy from it."""
    given = weights.fields.get("group_size")
    size = None if given is None else weights.choice("group_size", (*GROUPS, WHOLE_ROW))
    inferred = {None: None, WHOLE_ROW: "channel"}.get(size, "group")
    strategy = weights.choice("strategy", ("group", "channel"), inferred)
    if (strategy == "group") != (size in GROUPS):
        raise ModelError(
            f"config.json: {weights.path}group_size is {size} with the strategy {strategy!r}; "
            f"'group' takes one of {', '.join(map(str, GROUPS))}, 'channel' none"
        )
    return size if size in GROUPS else 0


@dataclass(frozen=True)
class CompressedTensors(Scheme):
    """compressed-tensors scheme. `targets` are names, patterns ("re:...") or classes of modules, by precedence."""

    method = "compressed-tensors"

    targets: tuple[tuple[str, Layer], ...]
    ignore: tuple[str, ...]

    @cached_property
    def _ignored_names(self) -> frozenset[str]:
        """Names and classes of modules that are not quantized, without the patterns."""
        return frozenset(pattern for pattern in self.ignore if not pattern.startswith("re:"))

    @classmethod
    def from_config(cls, section: ModelConfig) -> CompressedTensors:
        """Read `quantization_config`."""
        section.restrict("kv_cache_scheme", ({},))
        section.restrict("transform_config", ({},))
        section.restrict("quantization_status", ("compressed",))
        section.section("sparsity_config").restrict("format", ("dense",))
        stored = section.choice("format", (*_STORED, "mixed-precision"))
        groups, targets = section.section("config_groups"), []
        for name in groups.fields:
            fields = groups.section(name)
            group = _layer_of(fields, None if stored == "mixed-precision" else stored)
            targets += [(target, group) for target in fields.strings("targets")]
        if not targets:
            raise ModelError(f"config.json: {section.path}config_groups has no targets, so no module is quantized")
        # A name precedes a pattern, a pattern a class; of two groups with the same target, the last one wins.
        ordered = sorted(dict(targets).items(), key=lambda item: (item[0] in _CLASSES, "re:" in item[0], item[0]))
        ignore = section.strings("ignore")
        for pattern in (*ignore, *dict(ordered)):
            _check_pattern(pattern, section.path)
        return cls(tuple(ordered), ignore)

    def _layer(self, module: str) -> Layer | None:
        names = [name.removesuffix(".weight") for name in stored_names(f"{module}.weight")]
        if not self._ignored_names.isdisjoint((*names, _class_of(module))):
            return None
        if any(_matches(module, pattern) for pattern in self.ignore if pattern.startswith("re:")):
            return None
        layer = next(
            (
                layer
                for target, layer in self.targets
                if _matches(module, target) or (not target.startswith("re:") and target in names)
            ),
            None,
        )
        if layer is not None and _class_of(module) == "Embedding":
            raise ModelError(f"config.json quantizes the embedding {module}; only linear layers can be quantized")
        return layer

    def _tensors(self, checkpoint: Checkpoint, module: str, n: int, k: int) -> dict[str, Tensor]:
        layer = self._quantized(module)
        bits, groups = layer.format.bits, layer.format.groups(k)
        names = {name: f"{module}.{name}" for name in ("weight", "weight_packed", "weight_scale", "weight_zero_point")}
        tensors = {"weight_scale": checkpoint.get(names["weight_scale"], (n, groups))}
        if layer.packed:
            packed = checkpoint.get_integers(names["weight_packed"], (n, words_for(k, bits)), "I32")
            tensors["weight_packed"] = packed
        else:
            tensors["weight"] = checkpoint.get_integers(names["weight"], (n, k), "I8")
        if layer.format.zeros:
            shape, dtype = ((words_for(n, bits), groups), "I32") if layer.packed else ((n, groups), "I8")
            tensors["weight_zero_point"] = checkpoint.get_integers(names["weight_zero_point"], shape, dtype)
        if layer.packed and checkpoint.has(f"{module}.weight_shape"):
            tensors["weight_shape"] = checkpoint.get_integers(f"{module}.weight_shape", (2,), "I64")
        if layer.reordered or checkpoint.has(f"{module}.weight_g_idx"):
            tensors["weight_g_idx"] = checkpoint.get_integers(f"{module}.weight_g_idx", (k,), "I32")
        return tensors

    def _order(self, tensors: dict[str, Tensor], layer: Layer) -> npt.NDArray[np.int32] | None:
        indices = tensors.get("weight_g_idx")
        if indices is None or (indices.to_numpy() == -1).any():  # -1: never set
            return None
        return order_of(indices, layer.format.group)

    def _unpack(self, tensors: dict[str, Tensor], layer: Layer, n: int, k: int) -> tuple[Bytes, Floats, Bytes | None]:
        if "weight_shape" in tensors and (shape := tensors["weight_shape"]).to_numpy().tolist() != [n, k]:
            raise ModelError(
                f"tensor {shape.name} holds {shape.to_numpy().tolist()}, but config.json asks for {[n, k]}"
            )
        form, scales, zeros = layer.format, tensors["weight_scale"].to_f32(), tensors.get("weight_zero_point")
        if not layer.packed:
            return _offset(tensors["weight"], form), scales, None if zeros is None else _offset(zeros, form)
        values = unpack(tensors["weight_packed"].to_numpy(), form.bits, k)
        if zeros is None:
            return values, scales, None
        return values, scales, np.ascontiguousarray(unpack_transposed(zeros.to_numpy(), form.bits, n).T)


def _offset(tensor: Tensor, format_: QuantizedFormat) -> Bytes:
    """Return signed values plus the middle, u8 in the tensor's shape."""
    values: Bytes = tensor.to_numpy().view(np.uint8) + np.uint8(format_.middle)
    if format_.bits < 8 and values.size and values.max() >> format_.bits:
        raise ModelError(
            f"tensor {tensor.name} holds integers beyond {-format_.middle} to {format_.middle - 1}, "
            f"but config.json says that they have {format_.bits} bits"
        )
    return values


def _class_of(module: str) -> str:
    return _CLASSES[module.rsplit(".", maxsplit=1)[-1] in _EMBEDDINGS]


def _check_pattern(pattern: str, path: str) -> None:
    try:
        re.compile(pattern.removeprefix("re:") if pattern.startswith("re:") else "")
    except re.error as error:
        raise ModelError(f"config.json: {path[:-1]}: {pattern} is no regular expression: {error}") from None


def _matches(module: str, pattern: str) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern.removeprefix("re:"), module) is not None
    return pattern in {module, _class_of(module)}
