"""Products of few rows with packed bf16 or f32 weights by a block of threads, in the order of emit/products.py.

The sums of blocks of 32 k do not depend on each other. Eight threads compute those of a block of k and 32 columns, four
columns each, while others do the next ones, and leave them in shared memory. When it is full, a half-warp for each row
adds them in order, two tiles of 16 columns. Where an item has two blocks of threads, each multiplies by one tile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from quire.kernels.emit.builder import BF16, F32, I8, I32, VF32, Builder, Value
from quire.kernels.emit.cuda.blocks import BlockBuilder
from quire.kernels.emit.cuda.product_tiles import TOTALS_BYTES, ProductTile
from quire.kernels.emit.cuda.warps import ScratchError
from quire.kernels.emit.layout import PAIRS, TILE_ROWS
from quire.kernels.emit.products import LINE, ColumnSink, PackedColumns, Panels, Products, RowSink

THREADS = 256
"""Threads of a block."""

COLUMNS = 4
"""Columns of a thread: 16 bytes of packed weights, bf16 pairs or f32."""

_QUADS = TILE_ROWS // COLUMNS  # threads that have the columns of a tile

SUMS_BYTES = 32 << 10
"""Shared memory for sums of blocks. Several blocks of threads must fit a multiprocessor."""

PAIRS_AT_ONCE = {1: 16, 2: 8, 4: 4, 8: 2}
"""Numbers of rows that are computed together, and for each the pairs of k whose weights are loaded at once: as
registers allow beside the sums, eight for a row."""


@dataclass(frozen=True)
class RowGroup:
    """Rows of x that are computed together: `count` of them from number `first` on, at `base`, `wanted` of which
    matter; `tiles` tiles of 16 columns, and the memory of their sums, f32 [block][row][columns], which has room for
    `slots` blocks."""

    base: Value
    x: Panels
    first: Value
    wanted: Value
    count: int
    tiles: int
    sums: Value
    slots: int

    @property
    def row_bytes(self) -> int:
        """Bytes of the sums of a block and a row."""
        return self.tiles * LINE


@dataclass(frozen=True)
class BlockProducts(Products):
    """Emits products by a block of threads, which must all come here; of items with `parts` blocks, 1 or 2, each
    multiplies up to 16 rows by as many of the tiles, and the first one more rows."""

    sums_bytes: int = SUMS_BYTES
    parts: int = 1

    tile: ClassVar[type[ProductTile]] = ProductTile
    """What multiplies more than 16 rows."""

    @staticmethod
    def _threads(rows: RowGroup) -> int:
        """Return the number of threads that compute a block of k."""
        return rows.tiles * _QUADS

    def emit(self, b: Builder, x: Panels, rows: Value, columns: PackedColumns, sink: RowSink) -> None:
        """See Products; the rows are in half-warps of their own."""
        assert isinstance(b, BlockBuilder)
        for some in self._in_groups(b, x, rows, b.in_turn(self.sums_bytes)):
            self._rows(b, some, columns, sink)

    def emit_item(
        self, b: Builder, x: Panels, rows: Value, block: Value, count: int, columns: Callable[[Value], PackedColumns],
        sink: ColumnSink,
    ) -> None:  # fmt: skip
        """See Products; of more than 16 rows, every second item multiplies by two blocks."""
        assert isinstance(b, BlockBuilder)
        memory = b.scratch(max(self.sums_bytes, TOTALS_BYTES))
        with b.when(rows <= TILE_ROWS):
            whole = columns(block)
            mine = replace(whole, at=lambda k: b.address(whole.at(k), b.part * self.dtypes.tile_bytes))
            for some in self._in_groups(b, x, rows, memory, 2 // self.parts):
                self._rows(b, some, mine, sink.of(block * self.parts + b.part))
        with b.when(b.compare("sgt", rows, TILE_ROWS) & b.compare("eq", block % 2 + b.part, 0)):
            self.tile(self.dtypes, memory, x, rows, block, count, columns).emit(b, sink)

    def emit_blocks(
        self, b: Builder, x: Panels, rows: Value, count: Value | int, columns: Callable[[Value], PackedColumns],
        sink: ColumnSink,
    ) -> None:  # fmt: skip
        """See Products; the rows and blocks are in half-warps of their own."""
        assert isinstance(b, BlockBuilder)
        for some in self._in_groups(b, x, rows, b.in_turn(self.sums_bytes)):
            self._rows_and_blocks(b, some, b.index(count), columns, sink)

    def _in_groups(self, b: BlockBuilder, x: Panels, rows: Value, sums: Value, tiles: int = 2) -> Iterator[RowGroup]:
        """Open blocks that run for each group of rows, with memory for their sums."""
        least = 0
        for count in PAIRS_AT_ONCE:
            with b.when(b.compare("sgt", rows, least) & b.compare("sle", rows, count)):
                slots = self.sums_bytes // (count * tiles * LINE)
                yield RowGroup(x.panel(b, b.index(0)), x, b.index(0), rows, count, tiles, sums, slots)
            least = count
        with b.when(b.compare("sgt", rows, least)), b.loop(0, rows, least) as first:
            base = b.address(x.panel(b, first.index), first.index % TILE_ROWS * x.row_bytes)
            wanted, slots = (rows - first.index).min(least), self.sums_bytes // (least * tiles * LINE)
            yield RowGroup(base, x, first.index, wanted, least, tiles, sums, slots)

    def _rows(self, b: BlockBuilder, rows: RowGroup, columns: PackedColumns, sink: RowSink) -> None:
        """Multiply rows by a block of columns, in parts of k whose sums fit the memory."""
        mine, threads = b.address(rows.sums, b.team * rows.row_bytes), self._threads(rows)
        with b.loop(0, columns.blocks, rows.slots, state=[b.constant(0.0, VF32)] * rows.tiles) as start:
            stop = (start.index + rows.slots).min(columns.blocks)
            b.barrier()
            with b.loop(start.index + b.thread // threads, stop, THREADS // threads) as block:
                self._store_sums(b, rows, columns.at(block.index), block.index, block.index - start.index)
            b.barrier()
            with b.loop(start.index, b.select(b.team < rows.wanted, stop, start.index), state=start.state) as block:
                at = b.address(mine, (block.index - start.index) * (rows.count * rows.row_bytes))
                block.carry(*(total + b.load(at, 64 * i, VF32) for i, total in enumerate(block.state)))
            start.carry(*block.results)
        with b.when(b.team < rows.wanted), b.by_team():
            sink(rows.first + b.team, start.results)

    def _rows_and_blocks(
        self, b: BlockBuilder, rows: RowGroup, count: Value, columns: Callable[[Value], PackedColumns],
        sink: ColumnSink,
    ) -> None:  # fmt: skip
        """Multiply rows by blocks of columns, as many at a time as the memory has room for all of their sums."""
        most = columns(b.index(0)).blocks
        if isinstance(most, int) and most > rows.slots:
            raise ScratchError(f"sums of {most} blocks of k")
        blocks, threads = b.index(most), self._threads(rows)
        at_once = b.index(rows.slots) // blocks
        with b.loop(0, (count + at_once - 1) // at_once) as group:
            start = group.index * at_once
            some = (count - start).min(at_once)
            b.barrier()
            with b.loop(b.thread // threads, some * blocks, THREADS // threads) as slot:
                number, block = slot.index // blocks, slot.index % blocks
                self._store_sums(b, rows, columns(start + number).at(block), block, slot.index)
            b.barrier()
            with b.loop(b.team, some * rows.count, b.teams) as task:
                number, row = task.index // rows.count, task.index % rows.count
                with b.when(row < rows.wanted), b.by_team():
                    mine = b.address(rows.sums, (number * blocks * rows.count + row) * rows.row_bytes)
                    with b.loop(0, blocks, state=[b.constant(0.0, VF32)] * 2) as added:
                        at = b.address(mine, added.index * (rows.count * rows.row_bytes))
                        added.carry(*(total + b.load(at, 64 * i, VF32) for i, total in enumerate(added.state)))
                    sink(start + number, rows.first + row, added.results)

    def _store_sums(self, b: BlockBuilder, rows: RowGroup, weights: Value, block: Value, place: Value) -> None:
        """Store the thread's part of the sums of a block, of every row."""
        quad = b.thread % self._threads(rows)
        values = b.address(rows.base, block * rows.x.block_bytes)
        target = b.address(rows.sums, place * (rows.count * rows.row_bytes) + quad * (COLUMNS * 4))
        sums = self._block_sums(b, values, rows.x.row_bytes, b.address(weights, self._place(quad)), rows.count)
        for r, row in enumerate(sums):
            b.store_own(row, target, r * rows.row_bytes)

    def _place(self, quad: Value) -> Value:
        """Return where a thread's columns begin in a pair of k, or its even half, of a block of weights."""
        bytes_of = 1 if self.dtypes.weights == I8 else 4
        return quad // _QUADS * self.dtypes.tile_bytes + quad % _QUADS * (COLUMNS * bytes_of)

    def _block_sums(self, b: BlockBuilder, x: Value, row_bytes: int, weights: Value, count: int) -> list[list[Value]]:
        """Return even + odd of a block of k for each row and each of the thread's columns."""
        at_once, outputs = PAIRS_AT_ONCE[count], count * COLUMNS
        zeros = [b.constant(0.0, F32)] * (2 * outputs)
        with b.loop(0, PAIRS, at_once, state=zeros) as pairs:
            chains = list(pairs.state)
            loaded = [self._load_pair(b, weights, pairs.index + i) for i in range(at_once)]
            for i in range(0, at_once, 2):
                for r in range(count):
                    values = b.load_own(x, (pairs.index + i) * 8 + r * row_bytes, F32, 4, constant=True)
                    for k, value in enumerate(values):
                        for c, weight in enumerate(loaded[i + k // 2][k % 2]):
                            number = k % 2 * outputs + r * COLUMNS + c
                            chains[number] = b.fma(value, weight, chains[number])
            pairs.carry(*chains)
        sums = [even + odd for even, odd in zip(pairs.results[:outputs], pairs.results[outputs:], strict=True)]
        return [sums[r * COLUMNS : (r + 1) * COLUMNS] for r in range(count)]

    def _load_pair(self, b: BlockBuilder, weights: Value, pair: Value) -> tuple[Sequence[Value], Sequence[Value]]:
        """Load the even and the odd k of one pair for the thread's columns."""
        if self.dtypes.weights == F32:
            even, odd = (b.load_own(weights, pair * 128 + 64 * i, F32, COLUMNS, constant=True) for i in range(2))
            return even, odd
        if self.dtypes.weights == I8:
            halves = [b.load(weights, pair * 32 + 16 * i, I32) for i in range(2)]
            even, odd = ([self._byte(b, half, i) for i in range(COLUMNS)] for half in halves)
            return even, odd
        assert self.dtypes.weights == BF16
        words = b.load_own(weights, pair * 64, I32, COLUMNS, constant=True)
        return [(word << 16).bitcast(F32) for word in words], [(word & -65536).bitcast(F32) for word in words]

    @staticmethod
    def _byte(b: BlockBuilder, word: Value, number: int) -> Value:
        """Return a signed byte of a word as f32."""
        return b.convert("arith.sitofp", b.shift_right_signed(word << (24 - 8 * number), 24), F32)
