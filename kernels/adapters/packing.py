"""Packing of adapters for the kernels that read them: see emit/adapters.py."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from quire.kernels.adapters.adapter import Adapter, LowRank
from quire.kernels.adapters.changeable import unchangeable
from quire.kernels.emit.adapters import COLUMNS_BYTES, ENTRY_BYTES
from quire.kernels.emit.builder import F32
from quire.kernels.emit.layout import BLOCK, TILE_ROWS, Dtypes, round_up
from quire.kernels.errors import ModelError
from quire.kernels.operands import AdaptedProduct, MatrixPart
from quire.kernels.weights.checkpoint import Checkpoint

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
Packed = npt.NDArray[Any]

_LINE = 64
_ROWS, _COLUMNS = 64, 256  # of weights, whose changes are computed at once: meanwhile those of A stay in a cache


class _Memory:
    """Arrays that are to lie one after the other, each from a cache line on."""

    def __init__(self) -> None:
        self.size = 0
        self._arrays: list[tuple[int, Packed]] = []

    def add(self, array: Packed) -> int:
        """Add an array; return its offset."""
        offset, self.size = self.size, self.size + round_up(array.nbytes, _LINE)
        self._arrays.append((offset, array))
        return offset

    def write(self) -> tuple[npt.NDArray[np.uint8], int]:
        """Return memory with all arrays, and the address of the first."""
        memory = np.zeros(self.size + _LINE, np.uint8)
        base = -memory.ctypes.data % _LINE
        for offset, array in self._arrays:
            memory[base + offset : base + offset + array.nbytes] = array.reshape(-1).view(np.uint8)
        return memory, memory.ctypes.data + base


@dataclass(frozen=True)
class PackedAdapter:
    """An adapter in memory: its entry in each product's table, in the order of the products."""

    memory: npt.NDArray[np.uint8]  # owns what the entries point to
    entries: Sequence[npt.NDArray[np.int64]]


def pack_adapter(
    products: Sequence[AdaptedProduct], adapter: Adapter, dtypes: Dtypes, checkpoint: Checkpoint
) -> PackedAdapter:
    """Pack an adapter of a checkpoint for all products of a plan. Raises ModelError for one that has more to change."""
    known = {part.tensor for product in products for part in product.matrix.parts}
    unknown = [*(adapter.layers.keys() - known), *adapter.embeddings, *adapter.replaced, *adapter.tokens]
    if unknown:
        others = f" and {len(unknown) - 1} other tensors" if len(unknown) > 1 else ""
        raise unchangeable(f"the adapter changes {min(unknown)}{others}")
    memory = _Memory()
    packings = [_ProductPacking(product, adapter.layers, dtypes, checkpoint) for product in products]
    entries = [packing.pack(memory) for packing in packings]
    array, base = memory.write()
    for packing, entry in zip(packings, entries, strict=True):
        packing.finish(entry, array, base)
    return PackedAdapter(array, entries)


class _ProductPacking:
    """Packing of an adapter's changes of one product."""

    def __init__(
        self, product: AdaptedProduct, layers: Mapping[str, LowRank], dtypes: Dtypes, checkpoint: Checkpoint
    ) -> None:
        self._product, self._dtypes, self._checkpoint = product, dtypes, checkpoint
        self._parts = [(part, layers[part.tensor]) for part in product.matrix.parts if part.tensor in layers]
        tiles = 2 * round_up(product.matrix.n, BLOCK) // BLOCK
        self._columns = np.zeros((tiles, COLUMNS_BYTES // 8), np.int64)
        self._place = 0  # of the columns
        self._ranks: list[Floats] = []  # rows of A
        self._scales: list[tuple[float, float]] = []  # of each: factor and offset

    def pack(self, memory: _Memory) -> npt.NDArray[np.int64]:
        """Add all arrays to the memory; return the entry, with offsets for addresses."""
        entry = np.zeros(ENTRY_BYTES // 8, np.int64)
        if not self._parts:
            return entry
        self._columns[:, 1] = memory.add(np.ones(TILE_ROWS, np.float32))
        for part, change in self._parts:
            self._add(memory, part, change)
        used, k = -(-len(self._ranks) // TILE_ROWS), self._product.matrix.k
        assert used <= self._product.tiles
        down = np.zeros((used * TILE_ROWS, round_up(k, BLOCK)), np.float32)
        for row, ranks in zip(down, self._ranks, strict=False):  # one after the other: NumPy would hold the GIL for all
            row[:k] = ranks
        scales = np.zeros((used * TILE_ROWS, 2), np.float32)
        scales[: len(self._scales)] = self._scales
        self._place = memory.add(self._columns)  # with offsets, as yet
        tiled = np.ascontiguousarray(scales.reshape(used, TILE_ROWS, 2).swapaxes(1, 2))
        entry[:] = memory.add(_tiles(down, self._dtypes)), memory.add(tiled), self._place, used
        return entry

    def finish(self, entry: npt.NDArray[np.int64], memory: npt.NDArray[np.uint8], base: int) -> None:
        """Replace offsets by addresses, in memory that begins at the address `base`."""
        if self._parts:
            self._columns[:, :2] += base
            place = self._place + base - memory.ctypes.data
            memory[place : place + self._columns.nbytes] = self._columns.reshape(-1).view(np.uint8)
            entry[:3] += base

    def _add(self, memory: _Memory, part: MatrixPart, change: LowRank) -> None:
        """Add the ranks of a layer, an even number, and what its columns make of them."""
        first, outputs = len(self._ranks), slice(part.first, part.first + part.n)
        a, b = change.a[:, part.first_k : part.first_k + part.k], change.b[outputs]
        factors = None if change.magnitude is None else self._factors(part, change, change.magnitude[outputs])
        _check_bounds(a, self._dtypes, f"A of {part.tensor}")
        self._ranks += list(a)
        self._scales += [(change.scale, 0.0)] * len(a)
        if change.bias is not None:  # times a short vector's element that is 1
            with np.errstate(all="ignore"):
                bias = change.bias[outputs] if factors is None else change.bias[outputs] / factors
            b = np.concatenate([b, bias[:, None]], axis=1)
            self._pad(1.0)
        _check_bounds(b, self._dtypes, f"B or the bias of {part.tensor}")
        if len(self._ranks) % 2:
            self._pad(0.0)
        tiles = _tiles(b, self._dtypes)
        numbers = part.first_tile + np.arange(len(tiles)) * part.tile_step
        self._columns[numbers, 0] = memory.add(tiles) + np.arange(len(tiles)) * (tiles.nbytes // len(tiles))
        self._columns[numbers, 2:] = first, (len(self._ranks) - first) // 2
        if factors is not None:
            padded = np.ones(len(tiles) * TILE_ROWS, np.float32)
            padded[: len(factors)] = factors
            self._columns[numbers, 1] = memory.add(padded) + np.arange(len(tiles)) * (TILE_ROWS * 4)

    def _pad(self, offset: float) -> None:
        self._ranks.append(np.zeros(self._product.matrix.k, np.float32))
        self._scales.append((0.0, offset))

    def _factors(self, part: MatrixPart, change: LowRank, magnitude: Floats) -> Floats:
        """Return what multiplies the rows of a changed weight, so that their norms are the magnitudes."""
        a = change.a.astype(np.float64)
        with np.errstate(all="ignore"):
            norms = np.concatenate([_norms(weights, b, a) for weights, b in self._rows(part, change)])
            factors: Floats = magnitude / norms
        wrong = np.flatnonzero(~np.isfinite(factors))
        if len(wrong):
            raise ModelError(
                f"the adapter has the magnitude (DoRA) {magnitude[wrong[0]]} for row {part.first + wrong[0]} of "
                f"{part.tensor}, whose changed weights have the norm {norms[wrong[0]]}; their ratio must be finite: "
                "give an adapter of this base model"
            )
        return factors

    def _rows(self, part: MatrixPart, change: LowRank) -> Iterator[tuple[Floats, Doubles]]:
        """Yield rows of the part's tensor, a few at a time, and those of the scaled B."""
        shape = (part.whole_k, part.whole_n) if part.transposed else (part.whole_n, part.whole_k)
        whole, b = self._checkpoint.get(part.tensor, shape), (np.float32(change.scale) * change.b).astype(np.float64)
        transposed = whole.to_f32().T if part.transposed else None
        for first in range(part.first, part.first + part.n, _ROWS):
            last = min(first + _ROWS, part.first + part.n)
            yield (
                whole.rows(first, last - first).to_f32() if transposed is None else transposed[first:last],
                b[first:last],
            )


def _norms(weights: Floats, b: Doubles, a: Doubles) -> Floats:
    """Return the norms of rows of W + B A, with the same bits on every host.

    Products of f32 are exact in f64, and einsum adds them in the order of the ranks; BLAS has an order, and threads, of
    its own.
    """
    changed = weights.astype(np.float64)
    for start in range(0, changed.shape[1], _COLUMNS):
        columns = slice(start, start + _COLUMNS)
        changed[:, columns] += np.einsum("or,ri->oi", b, a[:, columns], optimize=False)
    norms: Floats = np.sqrt(np.square(changed, out=changed).sum(axis=1)).astype(np.float32)
    return norms


def _check_bounds(values: Floats, dtypes: Dtypes, what: str) -> None:
    """Raise ModelError for values that are infinite once they are packed, or not numbers."""
    kind, bits = ("f32", 0x7F7FFFFF) if dtypes.weights == F32 else ("bf16", 0x7F7F7FFF)
    most, largest = np.array(bits, np.uint32).view(np.float32), np.abs(values).max(initial=0.0)
    if not largest <= most:
        raise ModelError(
            f"the adapter has values up to {largest:.4g} in {what}, and {kind} has none above {most:.4g}; train it "
            "again, or serve it with --dtype float32"
        )


def _tiles(matrix: Floats, dtypes: Dtypes) -> Packed:
    """Pack w[n, k] in tiles of 16 columns by pairs of k: as weights are, but for the order of tiles."""
    n, k = round_up(matrix.shape[0], TILE_ROWS), round_up(matrix.shape[1], 2)
    padded = np.zeros((n, k), np.float32)
    padded[: matrix.shape[0], : matrix.shape[1]] = matrix
    pairs = padded.reshape(n // TILE_ROWS, TILE_ROWS, k // 2, 2)
    if dtypes.weights == F32:
        return np.ascontiguousarray(pairs.transpose(0, 2, 3, 1))
    bits = np.ascontiguousarray(pairs.transpose(0, 2, 1, 3)).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)  # to the nearest, ties to even
