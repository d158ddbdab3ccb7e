"""Floats of adapters as kernels read them, in the dtype of weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from quire.kernels._native import MatrixView
from quire.kernels.adapters.memory import Bytes
from quire.kernels.emit.builder import F32
from quire.kernels.emit.layout import BLOCK, PAIRED, PAIRED_ORDER, PAIRS, TILE_ROWS, Dtypes, round_up
from quire.kernels.errors import ModelError
from quire.kernels.weights.tensor import FLOAT_DTYPES, Tensor

Floats = npt.NDArray[np.float32]
Packed = npt.NDArray[Any]

_ALL = slice(None)


def stored_type(dtypes: Dtypes) -> type[np.generic]:
    """Return the type of elements in the dtype of weights."""
    return np.float32 if dtypes.weights == F32 else np.uint16


def check_bounds(values: Floats, dtypes: Dtypes, what: str) -> None:
    """Raise ModelError for values that are infinite once they are packed, or not numbers."""
    kind, bits = ("f32", 0x7F7FFFFF) if dtypes.weights == F32 else ("bf16", 0x7F7F7FFF)
    most, largest = np.array(bits, np.uint32).view(np.float32), np.abs(values).max(initial=0.0)
    if not largest <= most:
        raise ModelError(
            f"the adapter has values up to {largest:.4g} in {what}, and {kind} has none above {most:.4g}; train it "
            "again, or serve it with --dtype float32"
        )


def stored(values: Floats, dtypes: Dtypes) -> Packed:
    """Return an array in the dtype of weights, bf16 as its bits: to the nearest, ties to even."""
    if dtypes.weights == F32:
        return values
    bits = np.ascontiguousarray(values).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


@dataclass(frozen=True)
class PairTiles:
    """Memory of w[n, k] in tiles of 16 of its n columns by `pairs` pairs of k: as weights are packed, but for the order
    of the tiles."""

    columns: int
    pairs: int
    dtypes: Dtypes

    @property
    def num_tiles(self) -> int:
        """Tiles of 16 columns."""
        return round_up(self.columns, TILE_ROWS) // TILE_ROWS

    @property
    def tile_bytes(self) -> int:
        """Bytes of a tile."""
        return TILE_ROWS * 2 * self.pairs * np.dtype(stored_type(self.dtypes)).itemsize

    @property
    def size(self) -> int:
        """Bytes of all tiles."""
        return self.num_tiles * self.tile_bytes

    def pack(
        self, memory: Bytes, matrix: Tensor, what: str, *, inputs: slice = _ALL, first_n: int = 0, first_k: int = 0
    ) -> None:
        """Pack a matrix of floats, or the `inputs` of it, from w[first_n, first_k] on. Raises ModelError."""
        n, width = matrix.shape
        start, stop, _ = inputs.indices(width)
        data = matrix.data[start * FLOAT_DTYPES[matrix.dtype][1] :]
        view = MatrixView(data, matrix.format, n, stop - start, width, 1)
        if not view.pack_pairs(memory, self.dtypes.weights, self.pairs, first_n, first_k):
            check_bounds(matrix.to_f32()[:, inputs], self.dtypes, what)


def blocks(matrix: Floats, dtypes: Dtypes) -> Packed:
    """Pack w[n, k], n and k multiples of 32, exactly as the weights of the base are (emit/layout.py): [n/32][...]."""
    n, k = matrix.shape
    values = stored(matrix, dtypes).reshape(n // BLOCK, 2, TILE_ROWS, k // BLOCK, BLOCK)
    if dtypes.weights == F32:
        pairs = values.reshape(*values.shape[:4], PAIRS, 2)
        return np.ascontiguousarray(pairs.transpose(0, 3, 1, 4, 5, 2))
    if dtypes.weights == PAIRED:
        fours = values.reshape(*values.shape[:4], BLOCK // 4, 4)[..., PAIRED_ORDER]
        halves = fours.reshape(*fours.shape[:5], 2, 2)
        return np.ascontiguousarray(halves.transpose(0, 3, 1, 4, 5, 2, 6))
    pairs = values.reshape(*values.shape[:4], PAIRS, 2)
    return np.ascontiguousarray(pairs.transpose(0, 3, 1, 4, 2, 5))
