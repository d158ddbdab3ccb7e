"""Packing of the low-rank changes and the biases of linear layers: see emit/adapters.py."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from quire.kernels._native import MatrixView
from quire.kernels.adapted import AdaptedExperts, AdaptedProduct
from quire.kernels.adapters.adapter import Adapter, LowRank
from quire.kernels.adapters.memory import AdapterMemory, Bytes, relocate
from quire.kernels.adapters.packed_floats import PairTiles
from quire.kernels.emit.adapters import COLUMNS_BYTES
from quire.kernels.emit.layout import BLOCK, TILE_ROWS, Dtypes, round_up
from quire.kernels.errors import ModelError
from quire.kernels.operands import MatrixPart
from quire.kernels.weights.quantization import Quantization
from quire.kernels.weights.tensor import FLOAT_DTYPES, Tensor

Floats = npt.NDArray[np.float32]

_PIECE = 1 << 22  # elements of weights that are read at once: they may have to be computed


class ChangedTensors:
    """The tensors of a checkpoint, with the whole ones that an adapter has in their place."""

    def __init__(self, quantization: Quantization, adapter: Adapter) -> None:
        self._quantization, self._replaced = quantization, adapter.replaced

    def get(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return the float tensor `name`, which has this shape."""
        found = self._replaced.get(name)
        return self._quantization.checkpoint.get(name, shape) if found is None else found

    def weights(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return the weights `name`, as floats."""
        found = self._replaced.get(name)
        return self._quantization.floats(name, shape) if found is None else found

    def has_own(self, *names: str) -> bool:
        """Return whether the adapter has any of the tensors."""
        return not self._replaced.keys().isdisjoint(names)


class ProductPacking:
    """Packing of an adapter's changes of one product."""

    def __init__(self, product: AdaptedProduct, adapter: Adapter, dtypes: Dtypes, quantization: Quantization) -> None:
        self._product, self._dtypes = product, dtypes.plain
        self._tensors = ChangedTensors(quantization, adapter)
        self._changes = [(name, adapter.layers[name]) for name in product.layers if name in adapter.layers]
        num_tiles = 2 * round_up(product.matrix.n, BLOCK) // BLOCK
        self._columns = np.zeros((num_tiles if self._changes else 0, COLUMNS_BYTES // 8), np.int64)
        self._rows_of_a: list[tuple[int, MatrixPart, str, LowRank]] = []  # and the first one's place
        self._scales: list[tuple[float, float]] = []  # of each rank: factor and offset
        self._entry = np.zeros(product.entry_bytes // 8, np.int64)

    def pack(self, memory: AdapterMemory) -> npt.NDArray[np.int64]:
        """Add all arrays to the memory; return the entry, with offsets for addresses until `finish`."""
        if self._changes:
            self._entry[:4] = self._add_ranks(memory)
        biases = self._product.biases
        if biases is not None and self._tensors.has_own(*biases.names):
            self._entry[4] = memory.add(biases.values(self._tensors))
        return self._entry

    def finish(self, base: int) -> None:
        """Replace offsets by addresses, in memory that begins at the address `base`."""
        for addresses in (self._columns[:, 0], self._columns[:, 1], self._entry[:3], self._entry[4:]):
            relocate(addresses, base)

    def _add_ranks(self, memory: AdapterMemory) -> tuple[int, int, int, int]:
        """Add the changes of all layers; return the beginning of the entry."""
        self._columns[:, 1] = memory.add(np.ones(TILE_ROWS, np.float32))
        for name, change in self._changes:
            self._add(memory, name, change)
        rows = PairTiles(len(self._scales), round_up(self._product.matrix.k, BLOCK) // 2, self._dtypes)
        assert rows.num_tiles <= self._product.tiles

        def fill(view: Bytes) -> None:
            for place, part, name, change in self._rows_of_a:
                inputs = slice(part.first_k, part.first_k + part.k)
                rows.pack(view, change.stored_a, f"A of {name}", inputs=inputs, first_n=place)

        scales = np.zeros((rows.num_tiles * TILE_ROWS, 2), np.float32)
        scales[: len(self._scales)] = self._scales
        tiled = np.ascontiguousarray(scales.reshape(rows.num_tiles, TILE_ROWS, 2).swapaxes(1, 2))
        return memory.reserve(rows.size, fill), memory.add(tiled), memory.add(self._columns), rows.num_tiles

    def _add(self, memory: AdapterMemory, name: str, change: LowRank) -> None:
        """Add the ranks of a layer, an even number, and what the columns of its parts make of them."""
        first, parts = len(self._scales), self._product.layers[name]
        assert len({part.first_k for part in parts}) == 1  # all have the same A
        self._rows_of_a.append((first, parts[0], name, change))
        self._scales += [(change.scale, 0.0)] * change.rank
        if change.bias is not None:  # times a short vector's element that is 1
            self._scales.append((0.0, 1.0))
        if len(self._scales) % 2:
            self._scales.append((0.0, 0.0))
        for part in parts:
            self._add_columns(memory, part, name, change, first)

    def _add_columns(self, memory: AdapterMemory, part: MatrixPart, name: str, change: LowRank, first: int) -> None:
        """Add B of a part of a layer, whose ranks begin with number `first`."""
        outputs, bias = slice(part.first, part.first + part.n), None
        factors = None if change.magnitude is None else self._factors(part, name, change, change.magnitude[outputs])
        if change.bias is not None:
            with np.errstate(all="ignore"):
                bias = change.bias[outputs] if factors is None else change.bias[outputs] / factors
        tiles = PairTiles(part.n, (len(self._scales) - first) // 2, self._dtypes)

        def fill(view: Bytes) -> None:
            tiles.pack(view, change.stored_b.rows(part.first, part.n), f"B of {name}")
            if bias is not None:
                column = Tensor(name, "f32", (part.n, 1), np.ascontiguousarray(bias).view(np.uint8))
                tiles.pack(view, column, f"the bias of {name}", first_k=change.rank)

        numbers = part.first_tile + np.arange(tiles.num_tiles) * part.tile_step
        self._columns[numbers, 0] = memory.reserve(tiles.size, fill) + np.arange(tiles.num_tiles) * tiles.tile_bytes
        self._columns[numbers, 2:] = first, tiles.pairs
        if factors is not None:
            padded = np.ones(tiles.num_tiles * TILE_ROWS, np.float32)
            padded[: len(factors)] = factors
            self._columns[numbers, 1] = memory.add(padded) + np.arange(tiles.num_tiles) * (TILE_ROWS * 4)

    def _factors(self, part: MatrixPart, name: str, change: LowRank, magnitude: Floats) -> Floats:
        """Return what multiplies the rows of a changed weight, so that their norms are the magnitudes."""
        with np.errstate(all="ignore"):
            norms = self._norms(part, name, change)
            factors: Floats = magnitude / norms
        wrong = np.flatnonzero(~np.isfinite(factors))
        if len(wrong):
            raise ModelError(
                f"the adapter has the magnitude (DoRA) {magnitude[wrong[0]]} for row {part.first + wrong[0]} of "
                f"{name}, whose changed weights have the norm {norms[wrong[0]]}; their ratio must be finite: "
                "give an adapter of this base model"
            )
        return factors

    def _norms(self, part: MatrixPart, name: str, change: LowRank) -> Floats:
        """Return the norms of the rows of W + scale B A, of the part's tensor."""
        shape = (part.whole_k, part.whole_n) if part.transposed else (part.whole_n, part.whole_k)
        whole = self._tensors.weights(name if self._tensors.has_own(name) else part.tensor, shape)
        a, b = change.a, np.float32(change.scale) * change.stored_b.rows(part.first, part.n).to_f32()
        if part.transposed:
            column = whole.data[part.first * FLOAT_DTYPES[whole.dtype][1] :]
            view = MatrixView(column, whole.format, part.n, part.whole_k, 1, part.whole_n)
            return view.changed_norms(b, a)
        norms, rows = [], max(1, _PIECE // part.whole_k)
        for first in range(part.first, part.first + part.n, rows):
            last = min(first + rows, part.first + part.n)
            piece = whole.rows(first, last - first)
            view = MatrixView(piece.data, piece.format, last - first, part.whole_k, part.whole_k, 1)
            norms.append(view.changed_norms(b[first - part.first : last - part.first], a))
        return np.concatenate(norms)


class ExpertsPacking:
    """Packing of an adapter's changes of a product of each expert."""

    def __init__(self, experts: AdaptedExperts, adapter: Adapter, dtypes: Dtypes, quantization: Quantization) -> None:
        changed, first = adapter.layers.keys(), 0
        self._packings: list[tuple[int, ProductPacking]] = []  # of changed products, with the places of their entries
        self._entries: list[npt.NDArray[np.int64]] = []
        for product in experts.products:
            if not changed.isdisjoint(product.layers):
                self._packings.append((first, ProductPacking(product, adapter, dtypes, quantization)))
            first += product.entry_bytes // 8
        self._entry = np.zeros(first, np.int64)

    def pack(self, memory: AdapterMemory) -> npt.NDArray[np.int64]:
        """Add all arrays to the memory; return the entries, which `finish` fills."""
        self._entries = [packing.pack(memory) for _, packing in self._packings]
        return self._entry

    def finish(self, base: int) -> None:
        """Write the entries, with addresses in memory that begins at the address `base`."""
        for (first, packing), entry in zip(self._packings, self._entries, strict=True):
            packing.finish(base)
            self._entry[first : first + len(entry)] = entry
