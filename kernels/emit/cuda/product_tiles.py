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

GROUP = 8
"""Rows of x that lie together in shared memory."""

HALF = PAIRS // 2
"""Pairs of k of half a block."""

HALF_BYTES = 2 * HALF * 4
"""Bytes of half a block of k of a row of x."""

PIECE = 16
"""Bytes that are copied at a time: of x four k, of weights four columns of a pair of k, or of one k."""

GROUP_BYTES = GROUP * HALF_BYTES + PIECE
"""Bytes of a group of rows of x; those of the next one use other banks."""

PAIR_BYTES = COLUMNS * 4
"""Bytes of a pair of k of bf16 weights, or of f32 weights of one k."""

_COLUMNS = 4  # of a thread
_OUTPUTS = GROUP * _COLUMNS
_X_BYTES = ROWS // GROUP * GROUP_BYTES


@dataclass(frozen=True)
class ProductTile:
    """The product of `rows` rows of x, at most 128, with blocks number `block` and `block` + 1 of `count` blocks of
    columns, and `memory` for it. A thread has the sums of a group of rows and four columns."""

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
        pairs = b.select(self._is_active(b), b.index(HALF), b.index(0))
        b.barrier()
        self._copy(b, b.index(0), 0)
        with b.loop(0, blocks, state=[b.constant(0.0, F32)] * _OUTPUTS) as block:
            self._await(b)
            self._copy(b, block.index, 1)
            chains = self._add_half(b, 0, pairs, self._first_chains(b))
            self._await(b)
            with b.when(block.index + 1 < blocks):
                self._copy(b, block.index + 1, 0)
            chains = self._add_half(b, 1, pairs, chains)
            sums = self._block_sums(chains)
            block.carry(*(total + each for total, each in zip(block.state, sums, strict=True)))
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
        parts = HALF_BYTES // PIECE
        row, part = b.thread // parts, b.thread % parts
        source = b.address(self.x.panel(b, row), row % TILE_ROWS * self.x.row_bytes + part * PIECE)
        target = b.address(x, row // GROUP * GROUP_BYTES + row % GROUP * HALF_BYTES + part * PIECE)
        for first in range(0, ROWS, b.threads // parts):
            with b.when(row + first < self.rows):
                at = block * self.x.block_bytes + (first // TILE_ROWS * self.x.panel_bytes + half * HALF_BYTES)
                b.copy_piece(source, at, target, first // GROUP * GROUP_BYTES)
        quads = COLUMNS // _COLUMNS
        with b.when(b.thread < self._lines * quads):
            line, quad = b.thread // quads, b.thread % quads
            tile, within = quad // (TILE_ROWS // _COLUMNS), quad % (TILE_ROWS // _COLUMNS)
            columns = self.columns((self.block + tile // 2).min(self.count - 1))
            source = b.address(columns.at(block), tile % 2 * self.dtypes.tile_bytes)
            b.copy_piece(source, (line + half * self._lines) * LINE + within * PIECE, weights, b.thread * PIECE)

    @staticmethod
    def _await(b: BlockBuilder) -> None:
        """Wait until what was to be copied is there, and what was there before is no longer read."""
        b.await_pieces()
        b.barrier()

    # Sums

    def _is_active(self, b: BlockBuilder) -> Value:
        """Return whether the thread has rows."""
        return b.team * GROUP < self.rows

    def _first_chains(self, b: BlockBuilder) -> list[Value]:
        """Return the chains, [parity][row][column], before a block of k."""
        return [b.constant(0.0, F32)] * (2 * _OUTPUTS)

    def _block_sums(self, chains: Sequence[Value]) -> list[Value]:
        """Return the sums of a block of k, whose chains end."""
        return [even + odd for even, odd in zip(chains[:_OUTPUTS], chains[_OUTPUTS:], strict=True)]

    def _add_half(self, b: BlockBuilder, half: int, pairs: Value, chains: Sequence[Value]) -> list[Value]:
        """Add half a block of k, or none of its pairs, to the chains."""
        x, weights = self._half(b, half)
        x = b.address(x, b.team * GROUP_BYTES)
        weights = b.address(weights, b.thread % (COLUMNS // _COLUMNS) * PIECE)
        with b.loop(0, pairs, 2, state=chains) as pair:
            state = list(pair.state)
            loaded = [values for i in range(2) for values in self._load_pair(b, weights, pair.index + i)]
            at = b.address(x, pair.index * 8)
            for row in range(GROUP):
                for k, value in enumerate(b.load_own(at, row * HALF_BYTES, F32, 4)):
                    for column, weight in enumerate(loaded[k]):
                        number = k % 2 * _OUTPUTS + row * _COLUMNS + column
                        state[number] = b.fma(value, weight, state[number])
            pair.carry(*state)
        return pair.results

    def _load_pair(self, b: BlockBuilder, weights: Value, pair: Value) -> tuple[Sequence[Value], Sequence[Value]]:
        """Load the even and the odd k of one pair for the thread's columns."""
        if self.dtypes.weights == F32:
            even, odd = (b.load_own(weights, pair * (2 * PAIR_BYTES) + PAIR_BYTES * i, F32, 4) for i in range(2))
            return even, odd
        words = b.load_own(weights, pair * PAIR_BYTES, I32, 4)
        return [(word << 16).bitcast(F32) for word in words], [(word & -65536).bitcast(F32) for word in words]

    def _store_totals(self, b: BlockBuilder, totals: Sequence[Value]) -> None:
        """Store the products, f32 [row][column]."""
        b.barrier()
        target = b.address(self.memory, b.thread % (COLUMNS // _COLUMNS) * PIECE)
        for row in range(GROUP):
            at = b.address(target, (b.team * GROUP + row) * (COLUMNS * 4))
            b.store_own(totals[row * _COLUMNS : (row + 1) * _COLUMNS], at, 0)
