"""GPTQ (Frantar et al. 2022) as AutoGPTQ and GPTQModel store it.

A module with `n` outputs and `k` inputs has `qweight` i32 [k * bits / 32, n], packed along k; `scales`
[groups, n]; `qzeros` i32 [groups, n * bits / 32], packed along n; and optionally `g_idx` i32 [k], the group of each
input. The format "gptq" subtracts 1 from every zero point of a packed word, with borrow; "gptq_v2" does not.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quire.kernels.config import ModelConfig
from quire.kernels.emit.layout import QuantizedFormat
from quire.kernels.errors import ModelError
from quire.kernels.weights.checkpoint import Checkpoint, Tensor
from quire.kernels.weights.quantized.scheme import (
    BITS,
    GROUPS,
    WHOLE_ROW,
    Bytes,
    Floats,
    Layer,
    Scheme,
    Words,
    in_block,
    order_of,
    unpack,
    unpack_transposed,
    words_for,
)

_FORMATS = ("gptq", "gptq_v2")
_ONES = {4: np.uint32(0x11111111), 8: np.uint32(0x01010101)}


@dataclass(frozen=True)
class Gptq(Scheme):
    """GPTQ scheme.

    `overrides` are the layers of modules whose names match, the first match wins; None means not quantized. `inner` are
    the endings of the names of quantized modules; all are quantized if it is empty.
    """

    method = "gptq"

    layer: Layer
    overrides: tuple[tuple[re.Pattern[str], Layer | None], ...]
    inner: tuple[str, ...]
    head: bool
    decremented: bool

    @classmethod
    def from_config(cls, section: ModelConfig) -> Gptq:
        """Read `quantization_config`."""
        section.restrict("is_marlin_format", (False,))
        section.restrict("pack_dtype", ("int32",))
        section.restrict("rotation", ("",))
        format_ = section.choice("checkpoint_format", _FORMATS, section.choice("format", _FORMATS, "gptq"))
        head, decremented = section.get("lm_head", False), format_ == "gptq"
        return cls(_layer_of(section), _overrides(section), _inner(section), head, decremented)

    def _layer(self, module: str) -> Layer | None:
        if module.rsplit(".", maxsplit=1)[-1] == "lm_head":
            if not self.head:
                return None
        elif not in_block(module) or (self.inner and not module.endswith(tuple(f".{name}" for name in self.inner))):
            return None
        return next((layer for pattern, layer in self.overrides if pattern.match(module)), self.layer)

    def _tensors(self, checkpoint: Checkpoint, module: str, n: int, k: int) -> dict[str, Tensor]:
        layer = self._quantized(module)
        bits, groups = layer.format.bits, layer.format.groups(k)
        tensors = {
            "qweight": checkpoint.get_integers(f"{module}.qweight", (words_for(k, bits), n), "I32"),
            "qzeros": checkpoint.get_integers(f"{module}.qzeros", (groups, words_for(n, bits)), "I32"),
            "scales": checkpoint.get(f"{module}.scales", (groups, n)),
        }
        if layer.reordered or checkpoint.has(f"{module}.g_idx"):
            tensors["g_idx"] = checkpoint.get_integers(f"{module}.g_idx", (k,), "I32")
        return tensors

    def _order(self, tensors: dict[str, Tensor], layer: Layer) -> npt.NDArray[np.int32] | None:
        return order_of(tensors["g_idx"], layer.format.group) if "g_idx" in tensors else None

    def _unpack(self, tensors: dict[str, Tensor], layer: Layer, n: int, k: int) -> tuple[Bytes, Floats, Bytes | None]:
        values = unpack_transposed(tensors["qweight"].to_numpy(), layer.format.bits, k)
        scales = np.ascontiguousarray(tensors["scales"].to_f32().T)
        return values, scales, self._zeros(tensors["qzeros"], layer.format, n)

    def _zeros(self, tensor: Tensor, format_: QuantizedFormat, n: int) -> Bytes | None:
        """Return zero points u8 [n, groups], or None for a symmetric matrix, whose zero points must be the middle."""
        words: Words = tensor.to_numpy().view("<u4")
        ones = _ONES[format_.bits]
        if format_.zeros:
            stored = words + ones if self.decremented else words
            return np.ascontiguousarray(unpack(stored, format_.bits, n).T)
        middle = ones * np.uint32(format_.middle)
        # Some writers say "gptq" but mean "gptq_v2"; for symmetric matrices both are unambiguous.
        if not ((words == middle - ones).all() or (words == middle).all()):
            raise ModelError(
                f"tensor {tensor.name} has zero points other than {format_.middle}, "
                "but config.json says that they are symmetric (sym)"
            )
        return None


def _layer_of(section: ModelConfig) -> Layer:
    group = section.choice("group_size", (*GROUPS, WHOLE_ROW))
    symmetric, reordered = section.get("sym", True), section.get("desc_act", False)
    bits = section.choice("bits", BITS)
    return Layer(QuantizedFormat(bits, max(group, 0), zeros=not symmetric), reordered and group > 0)


def _inner(section: ModelConfig) -> tuple[str, ...]:
    """Read `modules_in_block_to_quantize`, a list of names or of lists of names."""
    field = "modules_in_block_to_quantize"
    entries = section.fields.get(field)
    if isinstance(entries, list):
        entries = [name for entry in entries for name in (entry if isinstance(entry, list) else [entry])]
    return ModelConfig({field: entries}, section.path).strings(field)


def _overrides(section: ModelConfig) -> tuple[tuple[re.Pattern[str], Layer | None], ...]:
    """Read `dynamic`, GPTQModel's fields by patterns of module names; patterns after "-:" are not quantized."""
    dynamic = section.section("dynamic")
    overrides = []
    for pattern in dynamic.fields:
        try:
            compiled = re.compile(pattern.removeprefix("-:").removeprefix("+:"))
        except re.error as error:
            raise ModelError(f"config.json: {dynamic.path}{pattern} is no regular expression: {error}") from None
        fields = ModelConfig({**section.fields, **dynamic.options(pattern)}, f"{dynamic.path}{pattern}.")
        overrides.append((compiled, None if pattern.startswith("-:") else _layer_of(fields)))
    return tuple(overrides)
