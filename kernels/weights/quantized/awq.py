"""AWQ (Lin et al. 2023) as AutoAWQ stores it for its GEMM kernels.

A module with `n` outputs and `k` inputs has `qweight` i32 [k, n / 8] and `qzeros` i32 [groups, n / 8], both
packed along n, and `scales` [groups, n]. A word holds eight neighbours, with the even ones in its low half.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from quire.kernels.config import ModelConfig
from quire.kernels.emit.layout import QuantizedFormat
from quire.kernels.errors import ModelError
from quire.kernels.weights.checkpoint import Checkpoint, Tensor
from quire.kernels.weights.quantized.scheme import (
    GROUPS,
    WHOLE_ROW,
    Bytes,
    Floats,
    Layer,
    Scheme,
    Words,
    in_block,
    transposed,
)

_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Neighbours held by the eight groups of four bits of a word, from the lowest bits."""


@dataclass(frozen=True)
class Awq(Scheme):
    """AWQ scheme. `floats` are names of modules that are not quantized, or of parts of the model that contain them."""

    method = "awq"

    layer: Layer
    floats: tuple[str, ...]

    @classmethod
    def from_config(cls, section: ModelConfig) -> Awq:
        """Read `quantization_config`."""
        for name in ("version", "format", "checkpoint_format"):  # the kernels that the weights are packed for
            section.restrict(name, ("gemm", "GEMM"))
        section.restrict("backend", ("autoawq", "auto"))
        section.restrict("zero_point", (True,))
        section.restrict("dynamic", ({},))
        bits, group = section.choice("bits", (4,)), section.choice("group_size", (*GROUPS, WHOLE_ROW))
        return cls(Layer(QuantizedFormat(bits, max(group, 0), zeros=True)), section.strings("modules_to_not_convert"))

    def _layer(self, module: str) -> Layer | None:
        left = any(f".{name.strip('.')}." in f".{module}." for name in self.floats)
        return self.layer if in_block(module) and not left else None

    def _tensors(self, checkpoint: Checkpoint, module: str, n: int, k: int) -> dict[str, Tensor]:
        groups = self._quantized(module).format.groups(k)
        if n % 8:
            raise ModelError(f"{module} has {n} outputs; AWQ packs 8 into a word")
        return {
            "qweight": checkpoint.get_integers(f"{module}.qweight", (k, n // 8), "I32"),
            "qzeros": checkpoint.get_integers(f"{module}.qzeros", (groups, n // 8), "I32"),
            "scales": checkpoint.get(f"{module}.scales", (groups, n)),
        }

    def _unpack(self, tensors: dict[str, Tensor], layer: Layer, n: int, k: int) -> tuple[Bytes, Floats, Bytes | None]:
        values, zeros = (_unpack(tensors[name].to_numpy()) for name in ("qweight", "qzeros"))
        return values, np.ascontiguousarray(tensors["scales"].to_f32().T), zeros


def _unpack(words: Words) -> Bytes:
    """Unpack u8 [8 * columns, rows] from 32-bit words [rows, columns]."""
    turned = transposed(words.view("<u4"))
    out = np.empty((len(turned), 8, turned.shape[1]), np.uint8)
    for position, neighbour in enumerate(_ORDER):
        out[:, neighbour] = turned >> np.uint32(4 * position) & np.uint32(15)
    return out.reshape(-1, turned.shape[1])
