"""Products of rows of x with a packed block of weights, summed in the order of an AMX tile.

For each output: blocks of 32 along k; within a block one f32 accumulator for even k and one for odd k, each starting
from zero, in order, by FMA; then `acc += even + odd`. GEMM, attention scores and attention values all use this module,
so their bits are the same on every instruction set and for any number of rows.

`vdpbf16ps` multiplies pairs of bf16 and adds the product of the upper halves, then that of the lower ones, each by an
FMA. Pairs of (k, k + 2) and of (k + 1, k + 3), the first one above, therefore continue the chains of even and of odd k.
Weights and activations are stored in such pairs. KV pages, whose layout all hosts share, are paired when they are
loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from quire.kernels import _native
from quire.kernels.emit.builder import BF16, F32, I32, VF32, Builder, Value, vector
from quire.kernels.emit.dots import is_narrow
from quire.kernels.emit.layout import PAIRED, PAIRS, TILE_ROWS, Dtypes, load_pair, load_quad

NEAR_BYTES, STREAM_BYTES, FAR_BYTES = 512, 2048, 4096
"""Prefetch distances of weights: into the first-level cache, which allows few outstanding misses, for products that
read weights once (NEAR) and for those that share blocks among rows (STREAM); and into the second-level cache, or into
the first-level one for quantized weights in registers of 16 lanes (FAR). Measured on a Zen 4; other distances gain up
to 10 % for one number of rows, dtype and instruction set and lose as much for another one. On AVX2, weights are
prefetched by NEAR alone: one row reads memory at 100 % of the rate of plain loads, not 90 (Zen 2)."""

LINE = _native.CACHE_LINE


class ColumnSink:
    """Takes products: called with the number of a block of 32 columns, a row number and its two vectors of 16 columns.
    One of a linear layer may be called with the number of a tile of 16 columns and one vector as well.

    Rows in memory are taken together.
    """

    def __init__(self, store: Callable[[Value, Value, Sequence[Value]], None]) -> None:
        self._store = store

    def __call__(self, block: Value, row: Value, values: Sequence[Value]) -> None:
        """Take a row's products with a block of columns."""
        self._store(block, row, values)

    def take(self, b: Builder, block: Value, first: Value, count: Value, totals: Value) -> None:
        """Take the products of `count` rows from number `first` on, f32 [row][32 columns] at `totals`."""
        with b.loop(0, count) as row:
            at = b.address(totals, row.index * (2 * LINE))
            self._store(block, first + row.index, [b.load(at, column * LINE, VF32, LINE) for column in range(2)])

    def of(self, block: Value) -> RowSink:
        """Return what takes products with one block of columns."""
        return RowSink(self, block)


@dataclass(frozen=True)
class RowSink:
    """A ColumnSink with its block of columns."""

    sink: ColumnSink
    block: Value

    def __call__(self, row: Value, values: Sequence[Value]) -> None:
        """Take a row's products."""
        self.sink(self.block, row, values)

    def take(self, b: Builder, first: Value, count: Value, totals: Value) -> None:
        """Take rows in memory: see ColumnSink."""
        self.sink.take(b, self.block, first, count, totals)


Chain = tuple[int, int]
"""The column of tiles, 0 or 1, and the parity of k, even (0) or odd (1), of a sum."""

_IN_TURN = ([(0, 0)], [(0, 1)], [(1, 0)], [(1, 1)])
_BY_COLUMN = ([(0, 0), (0, 1)], [(1, 0), (1, 1)])
_TOGETHER = ([(0, 0), (0, 1), (1, 0), (1, 1)],)

RowChunks = Sequence[tuple[int, Sequence[Sequence[Chain]]]]
"""Numbers of rows computed at once, as many as the registers hold, then smaller ones for the remainder; and the chains
that are computed together."""

NARROW: RowChunks = (6, _IN_TURN), (4, _IN_TURN), (3, _IN_TURN), (2, _BY_COLUMN), (1, _BY_COLUMN)
"""Chunks of AVX2 and NEON. With 16 registers, accumulators matter more than loads: 12 of them, six rows of one chain.
NEON has 32 of half the length."""

WIDE: RowChunks = (8, _BY_COLUMN), (4, _BY_COLUMN), (2, _BY_COLUMN), (1, _BY_COLUMN)
"""Chunks of AVX-512 with weights from memory, whose tiles are read one after the other, in memory order: reading two at
a time confuses the hardware prefetcher and halves the speed (11 against 21 GB/s on a Zen 4)."""

WIDE_CACHED: RowChunks = (6, _TOGETHER), (4, _TOGETHER), (2, _TOGETHER), (1, _TOGETHER)
"""Chunks of AVX-512 with weights from a cache: two tiles at a time share the loads of x, which else are the limit."""

BLOCKS_PER_PASS = 16
"""Blocks that all rows use before the next ones: few enough for any second-level cache, and in bf16 for the first-level
cache of a CPU with AMX. With four, which fit into any first-level cache, the loops over rows take 7 % of the time of
`vdpbf16ps` and nothing is gained."""

PAIRS_PER_ITERATION = 4
"""Pairs of k in one iteration of the innermost loop. Fully unrolled, LLVM would hoist and spill its loads."""


@dataclass(frozen=True)
class Panels:
    """Rows of x in panels of 16: k-block j of row r in panel p starts at
    `base + p * panel_bytes + r * row_bytes + j * block_bytes`."""

    base: Value
    row_bytes: int
    block_bytes: int
    panel_bytes: int

    def panel(self, b: Builder, row: Value) -> Value:
        """Return the address of the panel that starts with `row`."""
        return b.address(self.base, row // TILE_ROWS * self.panel_bytes)


@dataclass(frozen=True)
class PackedColumns:
    """A packed block of 32 columns: `blocks` blocks of 32 along k; block j is at `at(j)`.

    While block j is computed, the blocks `prefetch(j)` are prefetched into the second-level cache, and the memory
    `near` bytes ahead into the first-level cache, unless `near` is 0.
    """

    blocks: Value | int
    at: Callable[[Value], Value]
    prefetch: Callable[[Value], Sequence[Value]]
    near: int = 0


@dataclass(frozen=True)
class Tile:
    """A tile of weights, and what is prefetched while it is read: see PackedColumns."""

    at: Value
    near: int
    later: Sequence[Value]


@dataclass(frozen=True)
class PartialProducts:
    """Products of `rows` rows of x with the blocks [start, stop) of the columns, to be added to `totals`, f32
    [row][32 columns]."""

    x: Panels
    rows: Value
    columns: PackedColumns
    start: Value
    stop: Value
    totals: Value


@dataclass(frozen=True)
class _RowChunk:
    """Rows of x that are computed at once: `count` of them, `row_bytes` apart from address `values` on, in one block of
    k; and the address of their totals."""

    values: Value
    row_bytes: int
    count: int
    totals: Value


@dataclass(frozen=True)
class Products:
    """Emits products for one instruction set and its dtypes; `rows_per_block` rows use a block of weights in turn.

    Products of activations that are stored as bf16 are AMX tiles (amx_products.py): `uses_tiles`.
    """

    uses_tiles: ClassVar[bool] = False

    isa: str
    dtypes: Dtypes
    rows_per_block: int

    def streamed(self, b: Builder, blocks: int, base: Value, rows: Value) -> PackedColumns:
        """Return `blocks` blocks at `base` that are read from memory by so many rows."""
        size = self.dtypes.block_bytes
        if self.isa == "avx2":
            return PackedColumns(blocks, lambda j: b.address(base, j * size), lambda _: (), NEAR_BYTES)
        far = self._far(b, rows)
        return PackedColumns(
            blocks, lambda j: b.address(base, j * size), lambda j: [b.address(base, j * size + far)], STREAM_BYTES
        )

    def _far(self, b: Builder, rows: Value) -> Value | int:
        """Return how many bytes ahead weights are prefetched into the second-level cache for so many rows."""
        return FAR_BYTES

    @property
    def uses_pairs(self) -> bool:
        """True if products are `vdpbf16ps`."""
        return self.dtypes.activations == PAIRED

    def emit(self, b: Builder, x: Panels, rows: Value, columns: PackedColumns, sink: RowSink) -> None:
        """Call `sink` with each of `rows` rows of x times the columns.

        All rows of a block use some blocks of weights before the next ones are read.
        """
        rows_per_block = self.rows_per_block
        totals = b.scratch(rows_per_block * 2 * LINE)
        with b.loop(0, rows, rows_per_block) as first:
            count = (rows - first.index).min(rows_per_block)
            with b.loop(0, count * 2) as line:
                b.store(b.constant(0.0, VF32), totals, line.index * LINE, LINE)
            panels = replace(x, base=x.panel(b, first.index))
            with b.loop(0, columns.blocks, BLOCKS_PER_PASS) as start:
                stop = (start.index + BLOCKS_PER_PASS).min(columns.blocks)
                self.add_blocks(b, PartialProducts(panels, count, columns, start.index, stop, totals))
            sink.take(b, first.index, count, totals)

    def emit_item(
        self, b: Builder, x: Panels, rows: Value, block: Value, count: int, columns: Callable[[Value], PackedColumns],
        sink: ColumnSink,
    ) -> None:  # fmt: skip
        """Multiply rows by block number `block` of `count` blocks of columns, each of which is another work item.

        One item may multiply by the next blocks as well, whose items then do nothing.
        """
        self.emit(b, x, rows, columns(block), sink.of(block))

    def emit_blocks(
        self, b: Builder, x: Panels, rows: Value, count: Value | int, columns: Callable[[Value], PackedColumns],
        sink: ColumnSink,
    ) -> None:  # fmt: skip
        """Multiply rows by `count` blocks of 32 columns, which `columns` returns and which have few blocks along k.

        Calls `sink` with the number of the columns besides the row and its products.
        """
        with b.loop(0, count) as number:
            self.emit(b, x, rows, columns(number.index), sink.of(number.index))

    def add_blocks(self, b: Builder, partial: PartialProducts) -> None:
        """Add partial products.

        The totals are in memory, so that the registers are left to the chains. The first panel of rows reads the
        weights from memory, the others find them in a cache.
        """
        if is_narrow(self.isa):
            self._add_panels(b, partial, b.index(0), partial.rows, NARROW)
            return
        self._add_panels(b, partial, b.index(0), partial.rows.min(TILE_ROWS), WIDE)
        cached = replace(partial, columns=replace(partial.columns, prefetch=lambda _: (), near=0))
        self._add_panels(b, cached, b.index(TILE_ROWS), partial.rows, WIDE_CACHED)

    def _add_panels(self, b: Builder, partial: PartialProducts, first: Value, last: Value, chunks: RowChunks) -> None:
        """Add the products of the rows [first, last), whose first one starts a panel."""
        x = partial.x
        with b.loop(first, last, TILE_ROWS) as panel:
            base, done = x.panel(b, panel.index), b.index(0)
            rows = (last - panel.index).min(TILE_ROWS)
            for count, passes in chunks:
                end = done + (rows - done) // count * count
                with b.loop(done, end, count) as row, b.loop(partial.start, partial.stop) as block:
                    values = b.address(base, row.index * x.row_bytes + block.index * x.block_bytes)
                    totals = b.address(partial.totals, (panel.index + row.index) * (2 * LINE))
                    chunk = _RowChunk(values, x.row_bytes, count, totals)
                    self._add_chunk(b, chunk, passes, self._tiles(b, partial.columns, block.index))
                done = end

    def _tiles(self, b: Builder, columns: PackedColumns, block: Value) -> list[Tile]:
        """Return the two tiles of a block of the columns."""
        starts = columns.at(block), *columns.prefetch(block)
        tiles = []
        for column in range(2):
            first, *later = (b.address(start, column * self.dtypes.tile_bytes) for start in starts)
            tiles.append(Tile(first, columns.near, later))
        return tiles

    def _add_chunk(
        self, b: Builder, chunk: _RowChunk, passes: Sequence[Sequence[Chain]], tiles: Sequence[Tile]
    ) -> None:
        """Add the products of a chunk with the tiles of one block to its totals."""
        sums: dict[Chain, list[Value]] = {}
        for chains in passes:
            sums |= self._chains(b, chunk, tiles, chains)
            for column in {column for column, _ in chains}:
                if (column, 0) in sums and (column, 1) in sums:
                    for r in range(chunk.count):
                        at = r * (2 * LINE) + column * LINE
                        both = sums[column, 0][r] + sums[column, 1][r]
                        b.store(b.load(chunk.totals, at, VF32, LINE) + both, chunk.totals, at, LINE)

    def _chains(
        self, b: Builder, chunk: _RowChunk, tiles: Sequence[Tile], chains: Sequence[Chain]
    ) -> dict[Chain, list[Value]]:
        """Return the sums of a chunk in each of `chains`."""
        rows = chunk.count
        load, element, step = (load_quad, I32, 2) if self.uses_pairs else (load_pair, F32, 1)
        zeros = [b.constant(0.0, VF32)] * (len(chains) * rows)
        with b.loop(0, PAIRS, PAIRS_PER_ITERATION, state=zeros) as pairs:
            state = list(pairs.state)
            for column, parity in chains:
                if parity == 0:
                    self._prefetch(b, tiles[column], pairs.index)
            for offset in range(0, PAIRS_PER_ITERATION, step):
                pair = pairs.index + offset
                weights = {column: load(b, self.dtypes, tiles[column].at, pair) for column, _ in chains}
                at = b.address(chunk.values, pair * (2 * self.dtypes.activation_bytes))
                for r in range(rows):
                    x = {p: b.broadcast(b.load(at, r * chunk.row_bytes + 4 * p, element)) for _, p in chains}
                    for i, (column, parity) in enumerate(chains):
                        number = i * rows + r
                        state[number] = self._multiply_add(b, x[parity], weights[column][parity], state[number])
            pairs.carry(*state)
        return {chain: pairs.results[i * rows : (i + 1) * rows] for i, chain in enumerate(chains)}

    def _prefetch(self, b: Builder, tile: Tile, pair: Value) -> None:
        """Prefetch as many bytes as the next PAIRS_PER_ITERATION pairs of the tile have."""
        pair_bytes = self.dtypes.tile_bytes // PAIRS
        for line in range(0, PAIRS_PER_ITERATION * pair_bytes, LINE):
            if tile.near:
                b.prefetch(tile.at, pair * pair_bytes + (tile.near + line), level=1)
            for other in tile.later:
                b.prefetch(other, pair * pair_bytes + line, level=2)

    def _multiply_add(self, b: Builder, x: Value, weights: Value, total: Value) -> Value:
        """Add the products of f32 lanes, or of pairs of bf16 in i32 lanes, to `total`."""
        if not self.uses_pairs:
            return b.fma(x, weights, total)
        halves = [b.convert("vector.bitcast", value, vector(BF16, 32)) for value in (weights, x)]
        return b.call("llvm.x86.avx512bf16.dpbf16ps.512", [total, *halves], VF32)
