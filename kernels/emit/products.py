"""The one product that everything is built of: rows of x times a packed block, in the order of an AMX tile.

For each output: blocks of 32 along k; in a block one f32 accumulator for even k and one for odd k, each from zero, in
order, by FMA; then `acc += even + odd`. GEMM, attention scores and attention values all come through here, so they
agree bit for bit on every instruction set, whatever the number of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from quire.kernels.emit.builder import Builder
from quire.kernels.emit.layout import PAIRS, TILE_ROWS, Numbers, load_pair
from quire.kernels.emit.value import F32, I8, I16, I32, I64, TILE, VF32, Value

NEAR_BYTES, FAR_BYTES = 512, 4096
"""How far ahead of use weights are called for: into the first-level cache, whose misses few can be on their way at a
time, and into the second. On a Zen 4 one thread reads 33 GB/s so, 26 with a single call 4096 ahead into the first, and
products of 8 to 32 rows lose nothing to misses. More of either, or nearer, is slower for one or the other."""

RowSink = Callable[[Value, Sequence[Value]], None]
"""Takes a row number and its two vectors of 16 columns."""


_MANY, _FEW = (8, 4, 2, 1), (2, 1)
ROW_CHUNKS = {"amx": _MANY, "avx512-vnni": _MANY, "avx512": _MANY, "avx2-vnni": _FEW, "avx2": _FEW}
"""Rows that are computed at once, as many as the registers hold, and how the rest is cut."""

PAIRS_A_TURN = 4
"""Pairs of k for each turn of the innermost loop. Unrolled as a whole, LLVM hoists its loads and spills them."""


@dataclass(frozen=True)
class Operand:
    """Rows of x in panels of 16: k-block j of row r in panel p starts at
    `base + p * panel_bytes + r * row_bytes + j * block_bytes`."""

    base: Value
    row_bytes: int
    block_bytes: int
    panel_bytes: int

    def panel(self, b: Builder, row: Value) -> Value:
        """Where the panel that begins with `row` lies."""
        return b.address(self.base, row // TILE_ROWS * self.panel_bytes)


@dataclass(frozen=True)
class Columns:
    """A packed block of 32 columns: `blocks` blocks of 32 along k, of which number j lies `at(j)`.

    `ahead(j)` is what to call into the second-level cache while that one is computed: blocks too, wanted later. What
    stands `near` bytes behind is called into the first, unless that is 0.
    """

    blocks: Value | int
    at: Callable[[Value], Value]
    ahead: Callable[[Value], Sequence[Value]]
    near: int = 0


@dataclass(frozen=True)
class Products:
    """Emits products for one instruction set and one set of number formats."""

    isa: str
    numbers: Numbers

    @property
    def uses_tiles(self) -> bool:
        """Whether products are AMX tiles."""
        return self.numbers.activations != F32

    def emit(self, b: Builder, x: Operand, rows: Value, columns: Columns, sink: RowSink) -> None:
        """Feeds `sink` with rows 0 .. `rows` of x times the columns."""
        if self.uses_tiles:
            self._emit_tiles(b, x, rows, columns, sink)
            return
        with b.loop(0, rows, TILE_ROWS) as panel:
            done, count = b.index(0), (rows - panel.index).min(TILE_ROWS)
            for chunk in ROW_CHUNKS[self.isa]:
                stop = done + (count - done) // chunk * chunk
                with b.loop(done, stop, chunk) as row:
                    at = b.address(x.panel(b, panel.index), row.index * x.row_bytes)
                    for r, values in enumerate(self._chunk(b, x, at, chunk, columns)):
                        sink(panel.index + row.index + r, values)
                done = stop

    def _chunk(self, b: Builder, x: Operand, rows: Value, chunk: int, columns: Columns) -> list[list[Value]]:
        """The two vectors of each of `chunk` rows."""
        with b.loop(0, columns.blocks, state=[b.constant(0.0, VF32)] * (2 * chunk)) as block:
            values = b.address(rows, block.index * x.block_bytes)
            start, ahead = columns.at(block.index), columns.ahead(block.index)
            sums: list[Value] = []
            for column in range(2):
                tile, *later = (b.address(base, column * self.numbers.tile_bytes) for base in (start, *ahead))
                sums += self._tile_sums(b, columns, values, x.row_bytes, chunk, tile, later)
            block.carry(*(c + s for c, s in zip(block.state, sums, strict=True)))
        return [[block.results[r], block.results[chunk + r]] for r in range(chunk)]

    def _tile_sums(
        self, b: Builder, columns: Columns, values: Value, row_bytes: int, chunk: int, tile: Value,
        later: Sequence[Value],
    ) -> list[Value]:  # fmt: skip
        """even + odd of one tile for each row. Tiles are read one after the other, in the order of memory: two at a
        time confuse the hardware's prefetcher and halve the speed (11 against 21 GB/s on a Zen 4)."""
        with b.loop(0, PAIRS, PAIRS_A_TURN, state=[b.constant(0.0, VF32)] * (2 * chunk)) as pairs:
            state = list(pairs.state)
            self._prefetch(b, columns, tile, later, pairs.index)
            for offset in range(PAIRS_A_TURN):
                pair = pairs.index + offset
                even_weights, odd_weights = load_pair(b, self.numbers, tile, pair)
                at = b.address(values, pair * 8)
                for r in range(chunk):
                    even, odd = (b.broadcast(b.load(at, r * row_bytes + 4 * i, F32)) for i in range(2))
                    state[2 * r] = b.fma(even, even_weights, state[2 * r])
                    state[2 * r + 1] = b.fma(odd, odd_weights, state[2 * r + 1])
            pairs.carry(*state)
        return [pairs.results[2 * r] + pairs.results[2 * r + 1] for r in range(chunk)]

    def _prefetch(self, b: Builder, columns: Columns, tile: Value, later: Sequence[Value], pair: Value) -> None:
        """Calls for what is wanted later, as much of it as the next PAIRS_A_TURN pairs of the tile are."""
        pair_bytes = self.numbers.tile_bytes // PAIRS
        for line in range(0, PAIRS_A_TURN * pair_bytes, 64):
            if columns.near:
                b.prefetch(tile, pair * pair_bytes + (columns.near + line), level=1)
            for other in later:
                b.prefetch(other, pair * pair_bytes + line, level=2)

    def _emit_tiles(self, b: Builder, x: Operand, rows: Value, columns: Columns, sink: RowSink) -> None:
        """Two panels of 16 rows at a time as AMX tiles, so that each tile that is loaded is used twice; then the last
        one. Rows past the last are computed and not handed out."""
        result = b.scratch(2 * 2 * TILE_ROWS * 64)
        pairs = (rows + (TILE_ROWS - 1)) // (2 * TILE_ROWS) * (2 * TILE_ROWS)
        for panels, start, stop in ((2, b.index(0), pairs), (1, pairs, rows)):
            with b.loop(start, stop, panels * TILE_ROWS) as first:
                self._tile_panels(b, x, first.index, panels, columns, result)
                with b.loop(0, (rows - first.index).min(panels * TILE_ROWS)) as row:
                    at = b.address(result, row.index * 128)
                    sink(first.index + row.index, [b.load(at, 64 * c, VF32, 64) for c in range(2)])

    def _tile_panels(self, b: Builder, x: Operand, row: Value, panels: int, columns: Columns, result: Value) -> None:
        """The products of `panels` panels from `row` on, as f32 [row][32 columns].

        Other columns want x again, but it must not drive w out of the nearest cache: it is loaded with the hint for the
        next one.
        """
        height, width = b.constant(TILE_ROWS, I16), b.constant(64, I16)
        bases = [x.panel(b, row + TILE_ROWS * i) for i in range(panels)]
        zeros = [b.call("llvm.x86.tilezero.internal", [height, width], TILE) for _ in range(2 * panels)]
        with b.loop(0, columns.blocks, state=zeros) as block:
            tiles, stride = columns.at(block.index), b.constant(x.row_bytes, I64)
            for later in columns.ahead(block.index):
                for line in range(0, self.numbers.block_bytes, 64):
                    b.prefetch(later, line, level=2)
            weights = [self._weight_tile(b, b.address(tiles, i * self.numbers.tile_bytes)) for i in range(2)]
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
        """A tile of w."""
        operands = [b.constant(TILE_ROWS, I16), b.constant(64, I16), self._bf16_tile(b, tile), b.constant(64, I64)]
        return b.call("llvm.x86.tileloadd64.internal", operands, TILE)

    def _bf16_tile(self, b: Builder, tile: Value) -> Value:
        """The tile as AMX reads it: int8, which bf16 holds exactly, is unpacked."""
        if self.numbers.weights != I8:
            return tile
        unpacked = b.scratch(TILE_ROWS * 64)
        with b.loop(0, PAIRS) as pair:
            even, odd = (value.bitcast(I32) for value in load_pair(b, self.numbers, tile, pair.index))
            b.store(even >> 16 | odd, unpacked, pair.index * 64, 64)
        return unpacked
