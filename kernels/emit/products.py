"""Products of rows of x with a packed block of weights, summed in the order of an AMX tile.

For each output: blocks of 32 along k; within a block one f32 accumulator for even k and one for odd k, each starting
from zero, in order, by FMA; then `acc += even + odd`. GEMM, attention scores and attention values all use this module,
so their bits are the same on every instruction set and for any number of rows.

`vdpbf16ps` multiplies pairs of bf16 and adds the product of the upper halves, then that of the lower ones, each by an
FMA. Pairs of (k, k + 2) and of (k + 1, k + 3), the first one above, therefore continue the chains of even and of odd k.
Weights are paired when they are loaded, which is little work next to the products of a few rows, so that all
instruction sets share their layout. Activations are stored in pairs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from quire.kernels import _native
from quire.kernels.emit.builder import BF16, F32, I8, I16, I32, I64, TILE, VF32, Builder, Value, vector
from quire.kernels.emit.layout import PAIRED, PAIRS, TILE_ROWS, Dtypes, load_pair, load_quad

NEAR_BYTES, STREAM_BYTES, FAR_BYTES = 512, 2048, 4096
"""Prefetch distances of weights: into the first-level cache, which allows few outstanding misses, for products that
read weights once (NEAR) and for those that share blocks among rows (STREAM); and into the second-level cache (FAR).
Measured on a Zen 4; other distances gain up to 10 % for one number of rows, dtype and instruction set and lose as much
for another one."""

LINE = _native.CACHE_LINE

RowSink = Callable[[Value, Sequence[Value]], None]
"""Called with a row number and its two vectors of 16 columns."""

_TOGETHER, _IN_TURN = ((0, 1),), ((0,), (1,))
_MANY = ((8, _TOGETHER), (4, _TOGETHER), (2, _TOGETHER), (1, _TOGETHER))
_FEW = ((6, _IN_TURN), (4, _IN_TURN), (3, _IN_TURN), (2, _TOGETHER), (1, _TOGETHER))
ROW_CHUNKS = {
    "amx": _MANY, "avx512-bf16": _MANY, "avx512-vnni": _MANY, "avx512": _MANY, "avx2-vnni": _FEW, "avx2": _FEW
}  # fmt: skip
"""Numbers of rows computed at once, as many as the registers hold, then smaller ones for the remainder; and whether the
chains of even k (0) and of odd k (1) are computed together or in turn. In turn, 12 of the 16 registers of AVX2
accumulate: six rows by one tile, and each value that is loaded is used for as many FMAs as the loads allow."""

ROWS_PER_BLOCK = 64
"""Rows that use blocks of weights while these are in a cache."""

BLOCKS_PER_PASS = 16
"""Blocks that all rows use before the next ones: few enough for any second-level cache. With four, which fit into the
first-level cache, the loops over rows take 7 % of the time of `vdpbf16ps` and nothing is gained."""

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
class Products:
    """Emits products for one instruction set and its dtypes."""

    isa: str
    dtypes: Dtypes

    @property
    def uses_tiles(self) -> bool:
        """True if products are AMX tiles."""
        return self.dtypes.activations == BF16

    @property
    def uses_pairs(self) -> bool:
        """True if products are `vdpbf16ps`."""
        return self.dtypes.activations == PAIRED

    def emit(self, b: Builder, x: Panels, rows: Value, columns: PackedColumns, sink: RowSink) -> None:
        """Call `sink` with each of `rows` rows of x times the columns."""
        if self.uses_tiles:
            self._emit_tiles(b, x, rows, columns, sink)
            return
        totals = b.scratch(ROWS_PER_BLOCK * 2 * LINE)
        with b.loop(0, rows, ROWS_PER_BLOCK) as first:
            count = (rows - first.index).min(ROWS_PER_BLOCK)
            with b.loop(0, count * 2) as line:
                b.store(b.constant(0.0, VF32), totals, line.index * LINE, LINE)
            panels = replace(x, base=x.panel(b, first.index))
            with b.loop(0, columns.blocks, BLOCKS_PER_PASS) as start:
                stop = (start.index + BLOCKS_PER_PASS).min(columns.blocks)
                self._add_blocks(b, panels, count, columns, start.index, stop, totals)
            with b.loop(0, count) as row:
                at = b.address(totals, row.index * (2 * LINE))
                sink(first.index + row.index, [b.load(at, column * LINE, VF32, LINE) for column in range(2)])

    def _add_blocks(
        self, b: Builder, x: Panels, rows: Value, columns: PackedColumns, start: Value, stop: Value, totals: Value
    ) -> None:
        """Add the products with the blocks [start, stop) to `totals`, f32 [row][32 columns].

        All rows use these weights before the next ones are read. The totals are in memory, so that the registers are
        left to the chains.
        """
        with b.loop(0, rows, TILE_ROWS) as panel:
            base, done = x.panel(b, panel.index), b.index(0)
            count = (rows - panel.index).min(TILE_ROWS)
            for chunk, passes in ROW_CHUNKS[self.isa]:
                end = done + (count - done) // chunk * chunk
                with b.loop(done, end, chunk) as row, b.loop(start, stop) as block:
                    values = b.address(base, row.index * x.row_bytes + block.index * x.block_bytes)
                    total = b.address(totals, (panel.index + row.index) * (2 * LINE))
                    self._add_block(b, values, x.row_bytes, chunk, passes, columns, block.index, total)
                done = end

    def _add_block(
        self, b: Builder, values: Value, row_bytes: int, rows: int, passes: Sequence[Sequence[int]],
        columns: PackedColumns, block: Value, total: Value,
    ) -> None:  # fmt: skip
        """Add the products of `rows` rows with one block.

        Tiles are read one after the other, in memory order: reading two at a time confuses the hardware prefetcher and
        halves the speed (11 against 21 GB/s on a Zen 4).
        """
        starts = columns.at(block), *columns.prefetch(block)
        for column in range(2):
            first, *later = (b.address(start, column * self.dtypes.tile_bytes) for start in starts)
            tile = Tile(first, columns.near, later)
            even, odd = (
                chain for parities in passes for chain in self._chains(b, values, row_bytes, rows, tile, parities)
            )
            for r in range(rows):
                at = r * (2 * LINE) + column * LINE
                b.store(b.load(total, at, VF32, LINE) + (even[r] + odd[r]), total, at, LINE)

    def _chains(
        self, b: Builder, values: Value, row_bytes: int, rows: int, tile: Tile, parities: Sequence[int]
    ) -> list[list[Value]]:
        """Return the chains of `rows` rows over the even k (0) and the odd ones (1), as far as in `parities`."""
        load, element, step = (load_quad, I32, 2) if self.uses_pairs else (load_pair, F32, 1)
        zeros = [b.constant(0.0, VF32)] * (len(parities) * rows)
        with b.loop(0, PAIRS, PAIRS_PER_ITERATION, state=zeros) as pairs:
            state = list(pairs.state)
            if 0 in parities:
                self._prefetch(b, tile, pairs.index)
            for offset in range(0, PAIRS_PER_ITERATION, step):
                pair = pairs.index + offset
                weights = load(b, self.dtypes, tile.at, pair)
                at = b.address(values, pair * (2 * self.dtypes.activation_bytes))
                for i, (parity, row) in enumerate(itertools.product(parities, range(rows))):
                    x = b.broadcast(b.load(at, row * row_bytes + 4 * parity, element))
                    state[i] = self._multiply_add(b, x, weights[parity], state[i])
            pairs.carry(*state)
        return [pairs.results[i * rows : (i + 1) * rows] for i in range(len(parities))]

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

    def _emit_tiles(self, b: Builder, x: Panels, rows: Value, columns: PackedColumns, sink: RowSink) -> None:
        """Multiply two panels of 16 rows at a time with AMX tiles, so that each loaded tile is used twice; then the
        last panel. Rows past the last are computed but not passed to `sink`."""
        result = b.scratch(2 * 2 * TILE_ROWS * 64)
        pairs = (rows + (TILE_ROWS - 1)) // (2 * TILE_ROWS) * (2 * TILE_ROWS)
        for panels, start, stop in ((2, b.index(0), pairs), (1, pairs, rows)):
            with b.loop(start, stop, panels * TILE_ROWS) as first:
                self._tile_panels(b, x, first.index, panels, columns, result)
                with b.loop(0, (rows - first.index).min(panels * TILE_ROWS)) as row:
                    at = b.address(result, row.index * 128)
                    sink(first.index + row.index, [b.load(at, 64 * c, VF32, 64) for c in range(2)])

    def _tile_panels(
        self, b: Builder, x: Panels, row: Value, panels: int, columns: PackedColumns, result: Value
    ) -> None:
        """Store the products of `panels` panels from `row` on, as f32 [row][32 columns].

        x is needed again for other columns, but it must not evict w from the first-level cache, so it is loaded with
        the hint for the second.
        """
        height, width = b.constant(TILE_ROWS, I16), b.constant(64, I16)
        bases = [x.panel(b, row + TILE_ROWS * i) for i in range(panels)]
        zeros = [b.call("llvm.x86.tilezero.internal", [height, width], TILE) for _ in range(2 * panels)]
        with b.loop(0, columns.blocks, state=zeros) as block:
            tiles, stride = columns.at(block.index), b.constant(x.row_bytes, I64)
            for later in columns.prefetch(block.index):
                for line in range(0, self.dtypes.block_bytes, 64):
                    b.prefetch(later, line, level=2)
            weights = [self._weight_tile(b, b.address(tiles, i * self.dtypes.tile_bytes)) for i in range(2)]
            sums = []
            for i, base in enumerate(bases):
                values = b.address(base, block.index * x.block_bytes)
                a = b.call("llvm.x86.tileloaddt164.internal", [height, width, values, stride], TILE)
                for column, w in enumerate(weights):
                    operands = [height, width, width, block.state[2 * i + column], a, w]
                    sums.append(b.call("llvm.x86.tdpbf16ps.internal", operands, TILE))
            block.carry(*sums)
        for i, total in enumerate(block.results):
            at = b.address(result, i // 2 * (TILE_ROWS * 128) + i % 2 * 64)
            b.call_void("llvm.x86.tilestored64.internal", [height, width, at, b.constant(128, I64), total])

    def _weight_tile(self, b: Builder, tile: Value) -> Value:
        """Load a tile of w."""
        operands = [b.constant(TILE_ROWS, I16), b.constant(64, I16), self._bf16_tile(b, tile), b.constant(64, I64)]
        return b.call("llvm.x86.tileloadd64.internal", operands, TILE)

    def _bf16_tile(self, b: Builder, tile: Value) -> Value:
        """Return the tile as AMX reads it: int8 is converted to bf16, which is exact."""
        if self.dtypes.weights != I8:
            return tile
        unpacked = b.scratch(TILE_ROWS * 64)
        with b.loop(0, PAIRS) as pair:
            even, odd = (value.bitcast(I32) for value in load_pair(b, self.dtypes, tile, pair.index))
            b.store(even >> 16 | odd, unpacked, pair.index * 64, 64)
        return unpacked
