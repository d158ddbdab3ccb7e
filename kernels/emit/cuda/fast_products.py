"""Products of bf16 on tensor cores, whose order of sums is not the CPU's.

A warp multiplies a block of 32 k by two `mma.m16n8k16`, one after the other, whose sums begin with zero; the sums of
blocks are added in order. So a row's products do not depend on other rows, nor on how many there are: few rows compute
blocks of k beside each other, as in products.py, and many have tiles, as in product_tiles.py. Of each 16 k a thread has
four that lie together, and of each pair of k four columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quire.kernels.emit.builder import F32, I32, Value
from quire.kernels.emit.cuda.blocks import BlockBuilder
from quire.kernels.emit.cuda.product_tiles import (
    COLUMNS,
    GROUP,
    GROUP_BYTES,
    HALF,
    HALF_BYTES,
    PAIR_BYTES,
    PIECE,
    ProductTile,
)
from quire.kernels.emit.cuda.products import BlockProducts, RowGroup
from quire.kernels.emit.cuda.threads import WARP
from quire.kernels.emit.layout import BLOCK
from quire.kernels.emit.products import LINE

_TILES = BLOCK // 8  # of eight columns
_OF_ROWS = _TILES * 4  # a thread's sums of 16 rows
_GROUPS = 4  # groups of rows of a warp's part of a tile


@dataclass(frozen=True)
class _Fragment:
    """A thread's place in its warp: a row of each eight, or four columns, and four k of each 16, or eight columns."""

    row: Value
    part: Value

    @classmethod
    def of(cls, b: BlockBuilder) -> _Fragment:
        return cls(b.thread % WARP // 4, b.thread % 4)


@dataclass(frozen=True)
class FastTile(ProductTile):
    """The product of many rows; a warp has 32 rows and 32 columns."""

    def _is_active(self, b: BlockBuilder) -> Value:
        """See ProductTile."""
        return self._group(b) * GROUP < self.rows

    @staticmethod
    def _group(b: BlockBuilder) -> Value:
        """Return the number of the warp's first group of rows."""
        return b.thread // (2 * WARP) * _GROUPS

    @staticmethod
    def _column(b: BlockBuilder) -> Value:
        """Return the warp's first column."""
        return b.thread // WARP % 2 * BLOCK

    def _first_chains(self, b: BlockBuilder) -> list[Value]:
        """See ProductTile; [16 rows][eight columns][value of a thread]."""
        return [b.constant(0.0, F32)] * (_GROUPS // 2 * _OF_ROWS)

    def _block_sums(self, chains: Sequence[Value]) -> list[Value]:
        """See ProductTile."""
        return list(chains)

    def _add_half(self, b: BlockBuilder, half: int, pairs: Value, chains: Sequence[Value]) -> list[Value]:
        """See ProductTile."""
        lane, (x, weights) = _Fragment.of(b), self._half(b, half)
        x = b.address(x, self._group(b) * GROUP_BYTES + lane.row * HALF_BYTES + lane.part * PIECE)
        weights = b.address(weights, lane.part * (2 * PAIR_BYTES) + self._column(b) * 4 + lane.row * PIECE)
        with b.loop(0, pairs, HALF, state=chains) as once:
            words, sums = [b.load_own(weights, i * PAIR_BYTES, I32, 4) for i in range(2)], []
            for group in range(0, _GROUPS, 2):
                upper, lower = (_packed(b.load_own(x, (group + r) * GROUP_BYTES, F32, 4)) for r in range(2))
                sums += _multiplied(b, upper, lower, words, once.state[group // 2 * _OF_ROWS :][:_OF_ROWS])
            once.carry(*sums)
        return once.results

    def _store_totals(self, b: BlockBuilder, totals: Sequence[Value]) -> None:
        """See ProductTile."""
        b.barrier()
        lane = _Fragment.of(b)
        columns = self._column(b) * 4 + lane.part * (2 * PIECE)
        target = b.address(self.memory, (self._group(b) * GROUP + lane.row) * (COLUMNS * 4) + columns)
        for group in range(_GROUPS):
            sums = totals[group // 2 * _OF_ROWS :][:_OF_ROWS]
            _store_row(b, sums, group % 2, b.address(target, group * GROUP * (COLUMNS * 4)))


@dataclass(frozen=True)
class FastProducts(BlockProducts):
    """Emits products on tensor cores by a block of threads, which must all come here."""

    tile = FastTile

    @staticmethod
    def _threads(rows: RowGroup) -> int:
        """See BlockProducts."""
        return WARP

    def _store_sums(self, b: BlockBuilder, rows: RowGroup, weights: Value, block: Value, place: Value) -> None:
        """See BlockProducts."""
        lane, zero = _Fragment.of(b), b.constant(0, I32)
        x = b.address(rows.base, block * rows.x.block_bytes + lane.row * rows.x.row_bytes + lane.part * PIECE)
        weights = b.address(weights, self._place(lane.row) + lane.part * (2 * LINE))
        sums = [b.constant(0.0, F32)] * _OF_ROWS
        for half in range(2):
            upper = _packed(b.load_own(x, half * HALF_BYTES, F32, 4, constant=True))
            words = [b.load_own(weights, (half * HALF + i) * LINE, I32, 4, constant=True) for i in range(2)]
            sums = _multiplied(b, upper, [zero, zero], words, sums)
        with b.when(lane.row < rows.count):
            target = (place * rows.count + lane.row) * rows.row_bytes + lane.part * (2 * PIECE)
            _store_row(b, sums, 0, b.address(rows.sums, target))


def _packed(values: Sequence[Value]) -> list[Value]:
    """Return f32 that are rounded to bf16 as pairs of these, the first one below."""
    bits = [value.bitcast(I32) for value in values]
    return [bits[i] >> 16 | bits[i + 1] & -65536 for i in range(0, len(bits), 2)]


def _multiplied(
    b: BlockBuilder, upper: Sequence[Value], lower: Sequence[Value], words: Sequence[Sequence[Value]],
    sums: Sequence[Value],
) -> list[Value]:  # fmt: skip
    """Return `sums` plus the products of 16 rows, of which the thread has pairs of two, with its four columns."""
    rows, results = [upper[0], lower[0], upper[1], lower[1]], []
    for tile in range(_TILES):
        columns = [word[tile] for word in words]
        results += b.multiply_float_tiles(rows, columns, sums[4 * tile : 4 * tile + 4])
    return results


def _store_row(b: BlockBuilder, sums: Sequence[Value], row: int, target: Value) -> None:
    """Store a row's sums of eight neighbouring columns: of each four, every tile has one."""
    for i in range(2):
        b.store_own([sums[4 * tile + 2 * row + i] for tile in range(_TILES)], target, PIECE * i)
