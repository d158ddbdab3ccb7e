"""Packing of what adapters change of the embedding and of the head: emit/adapted_rows.py and emit/own_columns.py."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import numpy.typing as npt

from quire.kernels.adapted import HEAD, AdaptedColumns, AdaptedEmbedding
from quire.kernels.adapters.adapter import Adapter, Floats, TokenRows
from quire.kernels.adapters.memory import AdapterMemory, Bytes, relocate
from quire.kernels.adapters.packed_floats import PairTiles, blocks, check_bounds, stored, stored_type
from quire.kernels.emit.layout import BLOCK, Dtypes, round_up
from quire.kernels.emit.own_columns import MASK_BYTES
from quire.kernels.weights.tensor import Tensor

_PIECE = 1 << 20  # elements that are packed at once: NumPy would hold the GIL for all
_FACTOR = 5  # of an embedding's entry, which has addresses before it and the number of pairs of ranks


class OwnRows:
    """The rows of an embedding or a head, [vocabulary, width], that an adapter has of its own."""

    def __init__(self, name: str, width: int, whole: Tensor | None, trained: TokenRows | None) -> None:
        self._name, self._width, self._whole = name, width, whole
        self._trained = trained
        rows = () if trained is None else trained.tokens
        self._numbers: Mapping[int, int] = {token: number for number, token in enumerate(rows)}

    def __bool__(self) -> bool:
        return self._whole is not None or bool(self._numbers)

    def tokens(self, vocabulary: int) -> list[int]:
        """Return the tokens that have rows, in order."""
        return sorted(self._numbers) if self._whole is None else list(range(vocabulary))

    def read(self, tokens: list[int], dtypes: Dtypes) -> Floats:
        """Return rows of tokens, padded with zeros to a multiple of 32. Raises ModelError for one that is too large."""
        rows = np.zeros((len(tokens), round_up(self._width, BLOCK)), np.float32)
        if self._whole is not None and tokens:  # they follow one another then
            rows[:, : self._width] = self._whole.rows(tokens[0], len(tokens)).to_f32()
        for place, token in enumerate(tokens):
            if self._trained is not None and token in self._numbers:
                rows[place, : self._width] = self._trained.rows.row(self._numbers[token])
        check_bounds(rows, dtypes, f"rows of {self._name}")
        return rows


def _pieces(numbers: list[int], elements: int) -> Iterator[tuple[int, list[int]]]:
    """Yield parts of a list of tokens or blocks of so many elements each, with their place, that are packed at once."""
    size = max(1, _PIECE // elements)
    for start in range(0, len(numbers), size):
        yield start, numbers[start : start + size]


class EmbeddingPacking:
    """Packing of what an adapter changes of the embedding."""

    def __init__(self, embedding: AdaptedEmbedding, adapter: Adapter, dtypes: Dtypes) -> None:
        name = embedding.name
        self._embedding, self._dtypes = embedding, dtypes.plain
        self._own = OwnRows(name, embedding.width, adapter.replaced.get(name), adapter.tokens.get(name))
        self._change = adapter.embeddings.get(name)
        self._entry = np.zeros(embedding.entry_bytes // 8, np.int64)

    def pack(self, memory: AdapterMemory) -> npt.NDArray[np.int64]:
        """Add all arrays to the memory; return the entry, with offsets for addresses until `finish`."""
        if self._own:
            self._add_rows(memory)
        if self._change is not None:
            self._add_ranks(memory)
        return self._entry

    def finish(self, base: int) -> None:
        """Replace offsets by addresses, in memory that begins at the address `base`."""
        relocate(self._entry[:4], base)

    def _add_rows(self, memory: AdapterMemory) -> None:
        tokens = self._own.tokens(self._embedding.vocabulary)
        numbers = np.zeros(self._embedding.vocabulary, np.int32)
        numbers[tokens] = np.arange(1, 1 + len(tokens), dtype=np.int32)
        width, kind = round_up(self._embedding.width, BLOCK), np.dtype(stored_type(self._dtypes))

        def fill(view: Bytes) -> None:
            rows = view.view(kind).reshape(len(tokens), width)
            for start, some in _pieces(tokens, width):
                rows[start : start + len(some)] = stored(self._own.read(some, self._dtypes), self._dtypes)

        self._entry[:2] = memory.add(numbers), memory.reserve(len(tokens) * width * kind.itemsize, fill)

    def _add_ranks(self, memory: AdapterMemory) -> None:
        assert self._change is not None
        name, b = self._embedding.name, self._change.stored_b
        tiles = PairTiles(b.shape[0], -(-self._change.rank // 2), self._dtypes)
        kind = np.dtype(stored_type(self._dtypes))
        size = self._embedding.vocabulary * 2 * tiles.pairs * kind.itemsize
        place_of_a = memory.reserve(size, self._fill_a)
        place_of_b = memory.reserve(tiles.size, lambda view: tiles.pack(view, b, f"B of {name}"))
        self._entry[2:5] = place_of_a, place_of_b, tiles.pairs
        self._entry[_FACTOR:].view(np.float32)[0] = self._change.scale

    def _fill_a(self, view: Bytes) -> None:
        """Write A as [vocabulary, ranks] to memory of zeros, a rank at a time."""
        assert self._change is not None
        by_token = view.view(stored_type(self._dtypes)).reshape(self._embedding.vocabulary, -1)
        for rank in range(self._change.rank):
            values = self._change.stored_a.row(rank)
            check_bounds(values, self._dtypes, f"A of {self._embedding.name}")
            by_token[:, rank] = stored(values, self._dtypes)


class ColumnsPacking:
    """Packing of the columns of the head that an adapter has of its own.

    A tied head has the rows of tokens that are the embedding's, unless it has some itself.
    """

    def __init__(self, columns: AdaptedColumns, adapter: Adapter, dtypes: Dtypes) -> None:
        trained = adapter.tokens.get(HEAD, adapter.tokens.get(columns.name))
        self._columns, self._dtypes = columns, dtypes
        self._own = OwnRows(HEAD, columns.width, adapter.replaced.get(HEAD), trained)
        self._entry = np.zeros(columns.entry_bytes // 8, np.int64)
        self._addresses = np.zeros(round_up(columns.vocabulary, BLOCK) // BLOCK, np.int64)

    def pack(self, memory: AdapterMemory) -> npt.NDArray[np.int64]:
        """Add all arrays to the memory; return the entry, with offsets for addresses until `finish`."""
        if self._own:
            self._add(memory)
        return self._entry

    def finish(self, base: int) -> None:
        """Replace offsets by addresses, in memory that begins at the address `base`."""
        relocate(self._entry[:1], base)
        relocate(self._addresses, base)

    def _add(self, memory: AdapterMemory) -> None:
        tokens = self._own.tokens(self._columns.vocabulary)
        numbers = sorted({token // BLOCK for token in tokens})  # of blocks
        width = round_up(self._columns.width, BLOCK)
        size = MASK_BYTES + width // BLOCK * self._dtypes.block_bytes
        by_block: dict[int, list[int]] = {number: [] for number in numbers}
        for token in tokens:
            by_block[token // BLOCK].append(token)

        def fill(view: Bytes) -> None:
            places = view.reshape(len(numbers), size)
            for start, some in _pieces(numbers, BLOCK * width):
                own = [token for number in some for token in by_block[number]]
                at = [place * BLOCK + token % BLOCK for place, number in enumerate(some) for token in by_block[number]]
                rows, mask = np.zeros((len(some) * BLOCK, width), np.float32), np.zeros(len(some) * BLOCK, np.int32)
                rows[at], mask[at] = self._own.read(own, self._dtypes), 1
                part = places[start : start + len(some)]
                part[:, :MASK_BYTES] = mask.view(np.uint8).reshape(len(some), MASK_BYTES)
                part[:, MASK_BYTES:] = blocks(rows, self._dtypes).reshape(len(some), -1).view(np.uint8)

        self._addresses[numbers] = memory.reserve(len(numbers) * size, fill) + size * np.arange(len(numbers))
        self._entry[:] = memory.add(self._addresses), len(tokens) == self._columns.vocabulary
