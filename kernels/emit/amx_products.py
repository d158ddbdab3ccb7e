"""Products of rows of x with a packed block of bf16 or int8 weights by AMX tiles, in the order of products.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from quire.kernels.emit.builder import I8, I16, I32, I64, TILE, Builder, Value
from quire.kernels.emit.layout import PAIRS, TILE_ROWS, load_pair
from quire.kernels.emit.products import (
    BLOCKS_PER_PASS,
    LINE,
    ColumnSink,
    PackedColumns,
    Panels,
    PartialProducts,
    Products,
)

_TURN_ROWS = 2 * TILE_ROWS
"""Rows of a turn: two panels, which share the tiles of the weights."""

_FEW_ROWS = 4 * TILE_ROWS
"""Most rows whose first turn alone prefetches, a little ahead; turns of more rows share the prefetching of the next
pass."""

_AHEAD_BYTES = 1024
"""Prefetch distance for few rows, from where the hardware prefetcher goes on. Products of 1 to 64 rows take 80 to 93 %
of the time that they take with 4096 (Sapphire Rapids)."""

_SECOND_LEVEL = "t1"
"""Hint of loads of many rows of x, which are needed again for other columns, but must not evict the weights from the
first-level cache."""


@dataclass(frozen=True)
class AmxProducts(Products):
    """Emits products of bf16 activations by AMX tiles."""

    uses_tiles: ClassVar[bool] = True

    def emit_blocks(
        self, b: Builder, x: Panels, rows: Value, count: Value | int, columns: Callable[[Value], PackedColumns],
        sink: ColumnSink,
    ) -> None:  # fmt: skip
        """See Products. Up to 16 rows, as attention has in decode, are one panel, whose sums stay in tiles."""
        with b.when(rows <= TILE_ROWS):
            self._emit_panel(b, x, rows, count, columns, sink)
        with b.when(rows >= TILE_ROWS + 1):
            super().emit_blocks(b, x, rows, count, columns, sink)

    def _emit_panel(
        self, b: Builder, x: Panels, rows: Value, count: Value | int, columns: Callable[[Value], PackedColumns],
        sink: ColumnSink,
    ) -> None:  # fmt: skip
        """Multiply up to 16 rows by `count` blocks of columns.

        Totals stay in tiles, and a block is multiplied as soon as it is bf16. From memory it takes 10 to 20 % longer to
        convert several blocks before these are multiplied, or the next one before this one is (Sapphire Rapids).
        """
        totals = b.scratch(TILE_ROWS * 2 * LINE)
        with b.loop(0, count) as number:
            packed = columns(number.index)
            with b.loop(0, packed.blocks, state=[_zero_tile(b) for _ in range(2)]) as block:
                weights = self._bf16_block(b, packed.at(block.index), packed.prefetch(block.index))
                values = _load_tile(b, b.address(x.base, block.index * x.block_bytes), x.row_bytes)
                block.carry(*self._multiply(b, values, self._load_columns(b, weights), block.state))
            for i, tile in enumerate(block.results):
                _store_tile(b, tile, totals, i)
            sink.take(b, number.index, b.index(0), rows, totals)

    def add_blocks(self, b: Builder, partial: PartialProducts) -> None:
        """Add partial products.

        A turn multiplies two panels of 16 rows, so that each loaded tile is used twice; the last one may be a single
        panel. Totals of rows past the last are undefined. Each turn prefetches its share of the blocks: the first one
        of few rows all of them.
        """
        x, rows, columns = partial.x, partial.rows, partial.columns
        pairs = (rows + (TILE_ROWS - 1)) // _TURN_ROWS * _TURN_ROWS
        turns = (rows + (_TURN_ROWS - 1)) // _TURN_ROWS
        lines = self.dtypes.block_bytes // LINE
        equal = (turns + (lines - 1)) // turns
        share = b.select(rows <= _FEW_ROWS, b.index(lines), equal)  # of the lines of a block
        unused = b.scratch(2 * TILE_ROWS * 2 * LINE)
        for panels, first, last in ((2, b.index(0), pairs), (1, pairs, rows)):
            zeros = [_zero_tile(b) for _ in range(2 * panels)]
            with b.loop(first, last, panels * TILE_ROWS, state=[unused, *zeros]) as row:
                total = b.address(partial.totals, row.index * (2 * LINE))
                state = _exchange(b, row.state[0], row.state[1:], total)
                bases = [x.panel(b, row.index + TILE_ROWS * i) for i in range(panels)]
                line = row.index // _TURN_ROWS * share
                with b.loop(partial.start, partial.stop, state=state) as block:
                    for later in columns.prefetch(block.index):
                        with b.loop(line, (line + share).min(lines)) as prefetched:
                            b.prefetch(later, prefetched.index * LINE, level=2)
                    tiles = self._load_columns(b, self._bf16_block(b, columns.at(block.index)))
                    sums = []
                    for i, base in enumerate(bases):
                        values = _load_tile(b, b.address(base, block.index * x.block_bytes), x.row_bytes, _SECOND_LEVEL)
                        sums += self._multiply(b, values, tiles, block.state[2 * i : 2 * i + 2])
                    block.carry(*sums)
                row.carry(total, *block.results)
            for i, tile in enumerate(row.results[1:]):
                _store_tile(b, tile, row.results[0], i)

    def _far(self, b: Builder, rows: Value) -> Value | int:
        """See Products."""
        return b.select(rows <= _FEW_ROWS, b.index(_AHEAD_BYTES), BLOCKS_PER_PASS * self.dtypes.block_bytes)

    def _load_columns(self, b: Builder, weights: Value) -> list[Value]:
        """Load the two tiles of a block of bf16 weights."""
        return [_load_tile(b, b.address(weights, i * (TILE_ROWS * LINE)), LINE) for i in range(2)]

    def _multiply(self, b: Builder, x: Value, columns: Sequence[Value], totals: Sequence[Value]) -> list[Value]:
        """Return `totals` plus the products of a tile of x with the two tiles of a block."""
        sizes = [*_sizes(b), b.constant(LINE, I16)]
        return [
            b.call("llvm.x86.tdpbf16ps.internal", [*sizes, total, x, column], TILE)
            for total, column in zip(totals, columns, strict=True)
        ]

    def _bf16_block(self, b: Builder, block: Value, later: Sequence[Value] = ()) -> Value:
        """Return the block as AMX reads it: int8 is converted to bf16, which is exact. Prefetch the blocks `later`.

        The tiles of a block follow each other, so that their pairs are numbered from 0 to 31.
        """
        pair_bytes = self.dtypes.tile_bytes // PAIRS
        is_int8 = self.dtypes.weights == I8
        if not (is_int8 or later):
            return block
        unpacked = b.scratch(2 * TILE_ROWS * LINE) if is_int8 else block
        with b.loop(0, self.dtypes.block_bytes // LINE) as line:
            for other in later:
                b.prefetch(other, line.index * LINE, level=2)
            if is_int8:
                for i in range(LINE // pair_bytes):
                    pair = line.index * (LINE // pair_bytes) + i
                    even, odd = (value.bitcast(I32) for value in load_pair(b, self.dtypes, block, pair))
                    b.store(even >> 16 | odd, unpacked, pair * LINE, LINE)
        return unpacked


def _exchange(b: Builder, target: Value, tiles: Sequence[Value], source: Value) -> list[Value]:
    """Store the tiles at `target` and return those at `source`, in turns, so that products go on meanwhile."""
    loaded = []
    for i, tile in enumerate(tiles):
        _store_tile(b, tile, target, i)
        loaded.append(_load_tile(b, b.address(source, _tile_offset(i)), 2 * LINE))
    return loaded


def _zero_tile(b: Builder) -> Value:
    return b.call("llvm.x86.tilezero.internal", _sizes(b), TILE)


def _load_tile(b: Builder, at: Value, stride: int, hint: str = "") -> Value:
    return b.call(f"llvm.x86.tileloadd{hint}64.internal", [*_sizes(b), at, b.constant(stride, I64)], TILE)


def _store_tile(b: Builder, tile: Value, totals: Value, number: int) -> None:
    at = b.address(totals, _tile_offset(number))
    b.call_void("llvm.x86.tilestored64.internal", [*_sizes(b), at, b.constant(2 * LINE, I64), tile])


def _sizes(b: Builder) -> list[Value]:
    """Return the rows of a tile and the bytes of each."""
    return [b.constant(TILE_ROWS, I16), b.constant(LINE, I16)]


def _tile_offset(number: int) -> int:
    """Return the offset of a tile, [panel][column], in f32 [row][32 columns]."""
    return number // 2 * (TILE_ROWS * 2 * LINE) + number % 2 * LINE
