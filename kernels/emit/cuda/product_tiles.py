"""Products of many rows with packed bf16 or f32 weights by a block of threads, in the order of emit/products.py.

A block multiplies 128 rows by 64 columns. A thread has the sums of eight rows and four columns in registers: their
totals, and the chains of even and of odd k of a block of k. It reads both operands from shared memory, which has two
halves of a block of k: one is copied while the other is multiplied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from quire.kernels.emit.builder import F32, I32, VF32, Value
from quire.kernels.emit.cuda.blocks import BlockBuilder
from quire.kernels.emit.layout import BLOCK, PAIRS, TILE_ROWS, Dtypes
from quire.kernels.emit.products import LINE, ColumnSink, PackedColumns, Panels

ROWS = 128
"""Rows of a tile."""

COLUMNS = 2 * BLOCK
"""Columns of a tile."""

TOTALS_BYTES = ROWS * COLUMNS * 4
"""Shared memory of a tile: that of its products, in which its operands have been before."""

_ROWS, _COLUMNS = 8, 4  # of a thread
_OUTPUTS = _ROWS * _COLUMNS
_PIECE = 16  # bytes that are copied at a time
_HALF = PAIRS // 2  # pairs of k
_HALF_BYTES = BLOCK // 2 * 4  # of a row of x
_ROWS_BYTES = _ROWS * _HALF_BYTES + _PIECE  # of a thread's rows of x, so that those of the next thread use other banks
_X_BYTES = ROWS // _ROWS * _ROWS_BYTES
_PAIR_BYTES = COLUMNS * 4  # of bf16 weights; of f32 the even or the odd ones


@dataclass(frozen=True)
class ProductTile:
    """The product of `rows` rows of x, at most 128, with blocks number `block` and `block` + 1 of `count` blocks of
    columns, and `memory` for it."""

    dtypes: Dtypes
    memory: Value
    x: Panels
    rows: Value
    block: Value
    count: int
    columns: Callable[[Value], PackedColumns]

    def emit(self, b: BlockBuilder, sink: ColumnSink) -> None:
        """Call `sink` with every row of products of both blocks; all threads of a block must come here."""
        self._store_totals(b, self._multiply(b))
        with b.each(0, self.rows * 2) as task:
            row, number = task.index // 2, task.index % 2
            with b.when(self.block + number < self.count):
                at = b.address(self.memory, row * (COLUMNS * 4) + number * (BLOCK * 4))
                sink(self.block + number, row, [b.load(at, LINE * tile, VF32) for tile in range(2)])

    def _multiply(self, b: BlockBuilder) -> list[Value]:
        """Return the thread's sums, [row][column]."""
        blocks = self.columns(self.block).blocks
        pairs = b.select(b.team * _ROWS < self.rows, b.index(_HALF), b.index(0))
        b.barrier()
        self._copy(b, b.index(0), 0)
        with b.loop(0, blocks, state=[b.constant(0.0, F32)] * _OUTPUTS) as block:
            self._await(b)
            self._copy(b, block.index, 1)
            chains = self._add_half(b, 0, pairs, [b.constant(0.0, F32)] * (2 * _OUTPUTS))
            self._await(b)
            with b.when(block.index + 1 < blocks):
                self._copy(b, block.index + 1, 0)
            chains = self._add_half(b, 1, pairs, chains)
            both = zip(block.state, chains[:_OUTPUTS], chains[_OUTPUTS:], strict=True)
            block.carry(*(total + (even + odd) for total, even, odd in both))
        return block.results

    # Copies

    @property
    def _lines(self) -> int:
        """Lines of 64 bytes of half a tile of weights."""
        return self.dtypes.tile_bytes // 2 // LINE

    def _half(self, b: BlockBuilder, half: int) -> tuple[Value, Value]:
        """Return where half a block of k of x and of the weights is in shared memory."""
        each = _X_BYTES + self._lines * (COLUMNS // TILE_ROWS) * LINE
        x = b.address(self.memory, half * each)
        return x, b.address(x, _X_BYTES)

    def _copy(self, b: BlockBuilder, block: Value, half: int) -> None:
        """Begin to copy half a block of k."""
        x, weights = self._half(b, half)
        parts = _HALF_BYTES // _PIECE
        row, part = b.thread // parts, b.thread % parts
        source = b.address(self.x.panel(b, row), row % TILE_ROWS * self.x.row_bytes + part * _PIECE)
        target = b.address(x, row // _ROWS * _ROWS_BYTES + row % _ROWS * _HALF_BYTES + part * _PIECE)
        for first in range(0, ROWS, b.threads // parts):
            with b.when(row + first < self.rows):
                at = block * self.x.block_bytes + (first // TILE_ROWS * self.x.panel_bytes + half * _HALF_BYTES)
                b.copy_piece(source, at, target, first // _ROWS * _ROWS_BYTES)
        quads = COLUMNS // _COLUMNS
        with b.when(b.thread < self._lines * quads):
            line, quad = b.thread // quads, b.thread % quads
            tile, within = quad // (TILE_ROWS // _COLUMNS), quad % (TILE_ROWS // _COLUMNS)
            columns = self.columns((self.block + tile // 2).min(self.count - 1))
            source = b.address(columns.at(block), tile % 2 * self.dtypes.tile_bytes)
            b.copy_piece(source, (line + half * self._lines) * LINE + within * _PIECE, weights, b.thread * _PIECE)

    @staticmethod
    def _await(b: BlockBuilder) -> None:
        """Wait until what was to be copied is there, and what was there before is no longer read."""
        b.await_pieces()
        b.barrier()

    # Sums

    def _add_half(self, b: BlockBuilder, half: int, pairs: Value, chains: Sequence[Value]) -> list[Value]:
        """Add half a block of k, or none of its pairs, to the chains, [parity][row][column]."""
        x, weights = self._half(b, half)
        x = b.address(x, b.team * _ROWS_BYTES)
        weights = b.address(weights, b.thread % (COLUMNS // _COLUMNS) * _PIECE)
        with b.loop(0, pairs, 2, state=chains) as pair:
            state = list(pair.state)
            loaded = [values for i in range(2) for values in self._load_pair(b, weights, pair.index + i)]
            at = b.address(x, pair.index * 8)
            for row in range(_ROWS):
                for k, value in enumerate(b.load_own(at, row * _HALF_BYTES, F32, 4)):
                    for column, weight in enumerate(loaded[k]):
                        number = k % 2 * _OUTPUTS + row * _COLUMNS + column
                        state[number] = b.fma(value, weight, state[number])
            pair.carry(*state)
        return pair.results

    def _load_pair(self, b: BlockBuilder, weights: Value, pair: Value) -> tuple[Sequence[Value], Sequence[Value]]:
        """Load the even and the odd k of one pair for the thread's columns."""
        if self.dtypes.weights == F32:
            even, odd = (b.load_own(weights, pair * (2 * _PAIR_BYTES) + _PAIR_BYTES * i, F32, 4) for i in range(2))
            return even, odd
        words = b.load_own(weights, pair * _PAIR_BYTES, I32, 4)
        return [(word << 16).bitcast(F32) for word in words], [(word & -65536).bitcast(F32) for word in words]

    def _store_totals(self, b: BlockBuilder, totals: Sequence[Value]) -> None:
        b.barrier()
        target = b.address(self.memory, b.thread % (COLUMNS // _COLUMNS) * _PIECE)
        for row in range(_ROWS):
            at = b.address(target, (b.team * _ROWS + row) * (COLUMNS * 4))
            b.store_own(totals[row * _COLUMNS : (row + 1) * _COLUMNS], at, 0)
