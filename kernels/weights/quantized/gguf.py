"""Quantized types of GGUF files whose blocks are groups of 32 inputs with one f16 scale.

A block of `Q8_0` has the scale and 32 signed bytes. `Q4_0`, `Q5_0` and `IQ4_NL` have 16 bytes of nibbles, of which the
low ones are the first 16 inputs; `Q5_0` has the fifth bits of all, in 32 bits, before them, and the nibbles of `IQ4_NL`
are numbers of values in a table. Scales and integers are packed as they are, nothing is rounded. Source: ggml-quants.c.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from quire.kernels.config import ModelConfig
from quire.kernels.emit.layout import QuantizedFormat
from quire.kernels.errors import ModelError
from quire.kernels.weights.checkpoint import Checkpoint, Tensor
from quire.kernels.weights.quantized.scheme import Bytes, Floats, Layer, Scheme

_BLOCK = 32
_IQ4_NL = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int16)


@dataclass(frozen=True)
class _Type:
    """A type: `values` makes u8 [blocks, 32] of the bytes after the scale, u8 [blocks, ...]."""

    bits: int
    block_bytes: int
    values: Callable[[Bytes], Bytes]


def _q8_0(blocks: Bytes) -> Bytes:
    return blocks ^ np.uint8(128)


def _nibbles(blocks: Bytes) -> Bytes:
    return np.concatenate([blocks & np.uint8(15), blocks >> np.uint8(4)], axis=1)


def _q5_0(blocks: Bytes) -> Bytes:
    fifth = np.unpackbits(blocks[:, :4], axis=1, bitorder="little")
    return (_nibbles(blocks[:, 4:]) | fifth << np.uint8(4)) + np.uint8(128 - 16)


def _iq4_nl(blocks: Bytes) -> Bytes:
    values: Bytes = (_IQ4_NL + 128).astype(np.uint8)[_nibbles(blocks)]
    return values


TYPES = {
    "Q8_0": _Type(8, 34, _q8_0),
    "Q4_0": _Type(4, 18, _nibbles),
    "Q5_0": _Type(8, 22, _q5_0),
    "IQ4_NL": _Type(8, 18, _iq4_nl),
}
"""Types that can be loaded."""


@dataclass(frozen=True)
class Gguf(Scheme):
    """GGUF scheme. `types` are those of the modules that are not float."""

    method = "gguf"

    types: dict[str, str] = field(hash=False)

    @classmethod
    def from_config(cls, section: ModelConfig) -> Gguf:
        """Read `quantization_config`, as `quire.kernels.gguf.config` writes it."""
        types = section.options("types")
        for module, kind in types.items():
            if kind not in TYPES:
                raise ModelError(
                    f"the GGUF file has {module} in type {kind}; supported are F32, F16, BF16, {', '.join(TYPES)}: "
                    "choose a file of such a type, or quantize it again with `llama-quantize --pure`"
                )
        return cls(types)

    def _layer(self, module: str) -> Layer | None:
        kind = self.types.get(module)
        return None if kind is None else Layer(QuantizedFormat(TYPES[kind].bits, _BLOCK))

    def _tensors(self, checkpoint: Checkpoint, module: str, n: int, k: int) -> dict[str, Tensor]:
        return {"weight": checkpoint.get_integers(f"{module}.weight", (n, k), self.types[module])}

    def _unpack(self, tensors: dict[str, Tensor], layer: Layer, n: int, k: int) -> tuple[Bytes, Floats, Bytes | None]:
        tensor = tensors["weight"]
        kind = TYPES[tensor.dtype]
        blocks = tensor.data.reshape(-1, kind.block_bytes)
        scales = blocks[:, :2].copy().view("<f2").astype(np.float32).reshape(n, -1)
        return kind.values(blocks[:, 2:]).reshape(n, k), scales, None
