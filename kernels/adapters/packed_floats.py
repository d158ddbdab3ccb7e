"""Floats of adapters as kernels read them, in the dtype of weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from quire.kernels.emit.builder import F32
from quire.kernels.emit.layout import BLOCK, PAIRED, PAIRED_ORDER, PAIRS, TILE_ROWS, Dtypes, round_up
from quire.kernels.errors import ModelError

Floats = npt.NDArray[np.float32]
Packed = npt.NDArray[Any]


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


def tiles(matrix: Floats, dtypes: Dtypes) -> Packed:
    """Pack w[n, k] in tiles of 16 columns by pairs of k: as weights are, but for the order of tiles."""
    n, k = round_up(matrix.shape[0], TILE_ROWS), round_up(matrix.shape[1], 2)
    padded = np.zeros((n, k), np.float32)
    padded[: matrix.shape[0], : matrix.shape[1]] = matrix
    pairs = padded.reshape(n // TILE_ROWS, TILE_ROWS, k // 2, 2)
    if dtypes.weights == F32:
        return np.ascontiguousarray(pairs.transpose(0, 2, 3, 1))
    return stored(pairs.transpose(0, 2, 1, 3), dtypes)


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
