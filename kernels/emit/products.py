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

PREFETCH_BYTES = 4096
"""How far ahead of use a weight is called for. 1 to 8 KB do equally well; without it decode has 2/3 of the speed."""

RowSink = Callable[[Value, Sequence[Value]], None]
"""Takes a row number and its two vectors of 16 columns."""


_MANY, _FEW = (8, 4, 2, 1), (2, 1)
ROW_CHUNKS = {"amx": _MANY, "avx512-vnni": _MANY, "avx512": _MANY, "avx2-vnni": _FEW, "avx2": _FEW}
"""Rows that are computed at once, as many as the registers hold, and how the rest is cut."""

PAIRS_A_TURN = 4
"""Pairs of k for each turn of the innermost loop. Unrolled as a whole, LLVM hoists its loads and spills them."""


@dataclass(frozen=True)
class Operand:
    """Rows of x: the element of row r and k-block j starts at `base + r * row_bytes + j * block_bytes`."""

    base: Value
    row_bytes: int
    block_bytes: int


@dataclass(frozen=True)
class Products:
    """Emits products for one instruction set and one set of number formats."""

    isa: str
    numbers: Numbers

    @property
    def uses_tiles(self) -> bool:
        """Whether products are AMX tiles."""
        return self.numbers.activations != F32

    def emit(
        self,
        b: Builder,
        x: Operand,
        rows: Value,
        blocks: Value | int,
        block_at: Callable[[Value], Value],
        sink: RowSink,
    ) -> None:
        """Feeds `sink` with rows 0 .. `rows` of x times the blocks `block_at(0 .. blocks)`, 32 columns each."""
        if self.uses_tiles:
            self._emit_tiles(b, x, rows, blocks, block_at, sink)
        else:
            self._emit_chunks(b, x, rows, blocks, block_at, sink)

    def _emit_chunks(
        self,
        b: Builder,
        x: Operand,
        rows: Value,
        blocks: Value | int,
        block_at: Callable[[Value], Value],
        sink: RowSink,
    ) -> None:
        done: Value = b.index(0)
        for chunk in ROW_CHUNKS[self.isa]:
            stop = done + (rows - done) // chunk * chunk
            with b.loop(done, stop, chunk) as row:
                self._chunk(b, x, row.index, chunk, blocks, block_at, sink)
            done = stop

    def _chunk(
        self, b: Builder, x: Operand, row: Value, chunk: int, blocks: Value | int,
        block_at: Callable[[Value], Value], sink: RowSink,
    ) -> None:  # fmt: skip
        zero = b.constant(0.0, VF32)
        rows = b.address(x.base, row * x.row_bytes)
        with b.loop(0, blocks, state=[zero] * (2 * chunk)) as block:
            values = b.address(rows, block.index * x.block_bytes)
            tiles = block_at(block.index)
            sums: list[Value] = []
            for column in range(2):
                tile = b.address(tiles, column * self.numbers.tile_bytes)
                sums += self._tile_sums(b, values, x.row_bytes, chunk, tile)
            block.carry(*(c + s for c, s in zip(block.state, sums, strict=True)))
        for r in range(chunk):
            sink(row + r, [block.results[r], block.results[chunk + r]])

    def _tile_sums(self, b: Builder, values: Value, row_bytes: int, chunk: int, tile: Value) -> list[Value]:
        """even + odd of one tile for each row. Tiles are read one after the other, in the order of memory: two at a
        time confuse the hardware's prefetcher and halve the speed (11 against 21 GB/s on a Zen 4)."""
        with b.loop(0, PAIRS, PAIRS_A_TURN, state=[b.constant(0.0, VF32)] * (2 * chunk)) as pairs:
            state = list(pairs.state)
            for offset in range(PAIRS_A_TURN):
                pair = pairs.index + offset
                even_weights, odd_weights = self._load(b, tile, pair)
                at = b.address(values, pair * 8)
                for r in range(chunk):
                    even, odd = (b.broadcast(b.load(at, r * row_bytes + 4 * i, F32)) for i in range(2))
                    state[2 * r] = b.fma(even, even_weights, state[2 * r])
                    state[2 * r + 1] = b.fma(odd, odd_weights, state[2 * r + 1])
            pairs.carry(*state)
        return [pairs.results[2 * r] + pairs.results[2 * r + 1] for r in range(chunk)]

    def _load(self, b: Builder, tile: Value, pair: Value) -> tuple[Value, Value]:
        """A pair of the tile, with a call for what comes PREFETCH_BYTES later."""
        pair_bytes = self.numbers.tile_bytes // PAIRS
        for line in range(0, pair_bytes, 64):
            b.prefetch(tile, pair * pair_bytes + (PREFETCH_BYTES + line))
        return load_pair(b, self.numbers, tile, pair)

    def _emit_tiles(
        self,
        b: Builder,
        x: Operand,
        rows: Value,
        blocks: Value | int,
        block_at: Callable[[Value], Value],
        sink: RowSink,
    ) -> None:
        """Sixteen rows at a time as AMX tiles. Rows past the last are computed and not handed out."""
        height, width = b.constant(TILE_ROWS, I16), b.constant(64, I16)
        result = b.scratch(2 * TILE_ROWS * 64)
        with b.loop(0, rows, TILE_ROWS) as panel:
            base = b.address(x.base, panel.index * x.row_bytes)
            zeros = [b.call("llvm.x86.tilezero.internal", [height, width], TILE) for _ in range(2)]
            with b.loop(0, blocks, state=zeros) as block:
                values = b.address(base, block.index * x.block_bytes)
                a = b.call("llvm.x86.tileloadd64.internal", [height, width, values, b.constant(x.row_bytes, I64)], TILE)
                tiles = block_at(block.index)
                line = b.constant(64, I64)
                sums = []
                for column, total in enumerate(block.state):
                    at = self._bf16_tile(b, b.address(tiles, column * self.numbers.tile_bytes))
                    w = b.call("llvm.x86.tileloadd64.internal", [height, width, at, line], TILE)
                    sums.append(b.call("llvm.x86.tdpbf16ps.internal", [height, width, width, total, a, w], TILE))
                block.carry(*sums)
            for column, total in enumerate(block.results):
                at = b.address(result, column * 64)
                b.call_void("llvm.x86.tilestored64.internal", [height, width, at, b.constant(128, I64), total])
            with b.loop(0, (rows - panel.index).min(TILE_ROWS)) as row:
                vectors = [b.load(b.address(result, row.index * 128), 64 * c, VF32, 64) for c in range(2)]
                sink(panel.index + row.index, vectors)

    def _bf16_tile(self, b: Builder, tile: Value) -> Value:
        """The tile as AMX reads it: int8, which bf16 holds exactly, is unpacked."""
        if self.numbers.weights != I8:
            return tile
        unpacked = b.scratch(TILE_ROWS * 64)
        with b.loop(0, PAIRS) as pair:
            even, odd = (value.bitcast(I32) for value in load_pair(b, self.numbers, tile, pair.index))
            b.store(even >> 16 | odd, unpacked, pair.index * 64, 64)
        return unpacked
