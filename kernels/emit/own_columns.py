"""Columns of the head that adapters have of their own: for all tokens, or for those whose rows were trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quire.kernels.emit.adapters import RowAdapters
from quire.kernels.emit.builder import I64, PTR, Builder, Value
from quire.kernels.emit.context import EmitContext
from quire.kernels.emit.gemm import GemmItem, GemmKernel, GemmOutput
from quire.kernels.emit.layout import BLOCK, TILE_ROWS
from quire.kernels.emit.products import ColumnSink

OWN_COLUMNS_BYTES = 16
"""Bytes of an adapter in a table: the i64 address of the i64 addresses of its blocks of 32 columns, 0 if it has none,
and whether it has all columns, i64 0 or 1.

Blocks that are the base's have the address 0."""

MASK_BYTES = 4 * BLOCK
"""Bytes before the packed weights of a block: its mask, i32 [32], which is 0 for columns that are the base's."""

BLOCKS_PER_ITEM = 16


@dataclass(frozen=True)
class HeadKernel(GemmKernel):
    """The GEMM of a head whose rows may have adapters, which leaves out work items of rows that have all columns of
    their own. The last buffer is the table of own columns."""

    def _count(self, b: Builder, first: Value, count: Value) -> Value:
        own = _OwnColumns(b, b.buffer(7 + self.bias), self._adapters(b, 3 + self.bias).rows)
        with b.loop(first, first + count, state=[b.index(0)]) as row:
            row.carry(row.state[0] + own.of(row.index, offset=8))
        return b.select(b.compare("eq", row.results[0], count), b.index(0), count)


@dataclass(frozen=True)
class OwnColumnsKernel(GemmKernel):
    """A GEMM after another one, of the rows whose adapters have columns of their own: it replaces these in y.

    Weights are floats. Work items are BLOCKS_PER_ITEM blocks of 32 columns times all rows, `rows` at most. Rows of one
    adapter that follow one another in a panel are multiplied together. Buffers: x (packed activations, with memory of
    15 more rows after them, since tiles are read whole), y, the f32 bias if `bias`, those of `adapter_tiles`, and the
    table of own columns.
    """

    rows: int = 0

    def operations(self, rows: int, pairs: int) -> int:
        """Return none: of most rows no columns are replaced."""
        return 0

    def build(self, b: Builder, context: EmitContext) -> None:
        """See Kernel."""
        x, y = b.buffer(0), b.buffer(1)
        bias, adapters = b.buffer(2) if self.bias else None, self._adapters(b, 2 + self.bias)
        own = _OwnColumns(b, b.buffer(6 + self.bias), adapters.rows)
        runs, count, blocks = b.scratch(8 * self.rows), b.dim(self.dim), self._blocks
        row_bytes = BLOCK * context.dtypes.activation_bytes
        with b.items() as item:
            first, is_any = item * BLOCKS_PER_ITEM, own.store_runs(count, runs)
            with (
                b.when(is_any),
                b.loop(first, (first + BLOCKS_PER_ITEM).min(blocks)) as block,
                b.loop(0, count) as row,
            ):
                run = b.load(runs, row.index * 8, I64)
                with b.when(b.compare("ne", run, 0)):
                    place = b.address(own.of(row.index, PTR), block.index * 8)
                    with b.when(b.compare("ne", b.load(place, 0, I64), 0)):
                        at = b.load(place, 0, PTR)
                        output = GemmOutput(y, bias, adapters=adapters, mask=at)

                        sink = self._sink(b, context, output, row.index)

                        def store(_: Value, number: Value, values: Sequence[Value]) -> None:
                            sink(block.index, number, values)

                        rows = b.address(x, row.index % TILE_ROWS * row_bytes)
                        part = GemmItem(row.index // TILE_ROWS, run, b.index(0), 1, b.index(1))
                        self._multiply(b, context, rows, b.address(at, MASK_BYTES), part, ColumnSink(store))


@dataclass(frozen=True)
class _OwnColumns:
    """The table of own columns, and the adapters of rows."""

    b: Builder
    table: Value
    rows: RowAdapters

    def of(self, row: Value, kind: str = I64, offset: int = 0) -> Value:
        """Return the address of a row's own columns, or what else is in its entry."""
        return self.b.load(self.table, self.rows.number(self.b, row) * OWN_COLUMNS_BYTES + offset, kind)

    def store_runs(self, count: Value, runs: Value) -> Value:
        """Store how many rows from each on, in its panel, have the same columns of their own; 0 for a row that has
        none, or that is not the first of these. Return whether there are any."""
        b = self.b
        with b.loop(0, count, state=[b.index(0)]) as row:
            own, place = self.of(row.index), row.index % TILE_ROWS
            before = self.of((row.index - 1).max(0))
            is_first = b.compare("eq", place, 0) | b.compare("ne", own, before)
            end = (row.index - place + TILE_ROWS).min(count)
            with b.loop(row.index, end, state=[own, b.index(0)]) as other:  # until one differs: no address is 1
                is_same = b.compare("eq", self.of(other.index), other.state[0])
                other.carry(
                    b.select(is_same, other.state[0], b.index(1)),
                    b.select(is_same, other.state[1] + b.index(1), other.state[1]),
                )
            run = b.select(is_first & b.compare("ne", own, 0), other.results[1], 0)
            b.store(run, runs, row.index * 8)
            row.carry(row.state[0] | run)
        return b.compare("ne", row.results[0], 0)
