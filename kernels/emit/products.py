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
from quire.kernels.emit.value import F32, I16, I64, TILE, VF32, Value

RowSink = Callable[[Value, Sequence[Value]], None]
"""Takes a row number and its two vectors of 16 columns."""


@dataclass(frozen=True)
class Shape:
    """How an instruction set blocks products: rows at once, falling to 1, and accumulators that fit its registers."""

    row_chunks: tuple[int, ...]
    accumulators: int
    pairs_unrolled: int
    tiles: bool = False


SHAPES = {
    "amx": Shape((4, 2, 1), 16, 4, tiles=True),
    "avx512": Shape((4, 2, 1), 16, 4),
    "avx2": Shape((2, 1), 4, 4),
}


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
    def shape(self) -> Shape:
        """The blocking of this instruction set."""
        return SHAPES[self.isa]

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
        for chunk in self.shape.row_chunks:
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
            per_pass = 2 if 4 * chunk <= self.shape.accumulators else 1
            sums: list[Value] = []
            for first in range(0, 2, per_pass):
                sums += self._block(b, values, x.row_bytes, chunk, tiles, range(first, first + per_pass))
            # Sums come column by column, the carried state too: index = column * chunk + row.
            block.carry(*(c + s for c, s in zip(block.state, sums, strict=True)))
        for r in range(chunk):
            sink(row + r, [block.results[r], block.results[chunk + r]])

    def _block(
        self, b: Builder, values: Value, row_bytes: int, chunk: int, tiles: Value, columns: range
    ) -> list[Value]:
        """even + odd of one block, for each of `columns` (tiles of 16) and each row."""
        zero = b.constant(0.0, VF32)
        count = len(columns) * chunk
        step = self.shape.pairs_unrolled
        with b.loop(0, PAIRS, step, state=[zero] * (2 * count)) as pairs:
            state = list(pairs.state)
            for offset in range(step):
                pair = pairs.index + offset
                weights = [
                    load_pair(b, self.numbers, b.address(tiles, column * self.numbers.tile_bytes), pair)
                    for column in columns
                ]
                for r in range(chunk):
                    at = b.address(values, pair * 8)
                    even, odd = (b.broadcast(b.load(at, r * row_bytes + 4 * i, F32)) for i in range(2))
                    for c in range(len(columns)):
                        i = 2 * (c * chunk + r)
                        state[i] = b.fma(even, weights[c][0], state[i])
                        state[i + 1] = b.fma(odd, weights[c][1], state[i + 1])
            pairs.carry(*state)
        return [pairs.results[2 * i] + pairs.results[2 * i + 1] for i in range(count)]

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
            zeros = [self._tile(b, "tilezero.internal", [height, width]) for _ in range(2)]
            with b.loop(0, blocks, state=zeros) as block:
                values = b.address(base, block.index * x.block_bytes)
                a = self._tile(b, "tileloadd64.internal", [height, width, values, b.constant(x.row_bytes, I64)])
                tiles = block_at(block.index)
                line = b.constant(64, I64)
                sums = []
                for column, total in enumerate(block.state):
                    at = b.address(tiles, column * self.numbers.tile_bytes)
                    w = self._tile(b, "tileloadd64.internal", [height, width, at, line])
                    sums.append(self._tile(b, "tdpbf16ps.internal", [height, width, width, total, a, w]))
                block.carry(*sums)
            for column, total in enumerate(block.results):
                at = b.address(result, column * 64)
                b.intrinsic("llvm.x86.tilestored64.internal", [height, width, at, b.constant(128, I64), total], None)
            with b.loop(0, (rows - panel.index).min(TILE_ROWS)) as row:
                vectors = [b.load(b.address(result, row.index * 128), 64 * c, VF32, 64) for c in range(2)]
                sink(panel.index + row.index, vectors)

    def _tile(self, b: Builder, name: str, operands: Sequence[Value]) -> Value:
        tile = b.intrinsic(f"llvm.x86.{name}", operands, TILE)
        if tile is None:
            raise TypeError(f"{name} returns no tile")
        return tile
