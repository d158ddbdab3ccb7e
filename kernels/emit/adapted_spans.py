"""Products that adapters change only once several blocks of columns are multiplied: see adapters.py.

Where most rows have adapters of their own, each is read for a few rows alone. Pieces of B for one block of columns are
short, some 500 bytes to 4 KB, and a CPU reads memory faster in long ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quire.kernels.emit.adapters import AdapterOperands
from quire.kernels.emit.builder import I64, VF32, Builder, Value
from quire.kernels.emit.layout import Dtypes
from quire.kernels.emit.products import LINE, ColumnSink

SPAN_BLOCKS = 8
"""Most blocks of columns of a span."""

_SPAN_ROWS = 64
"""Most rows of a span."""

_ROWS_OF_AN_ADAPTER = 4
"""Where an adapter has as many rows, they share what is read of it, block by block."""

_BLOCK_BYTES = _SPAN_ROWS * 2 * LINE


@dataclass(frozen=True)
class AdaptedSpan:
    """Products of `rows` rows with up to SPAN_BLOCKS blocks of columns from number `first` on, f32 [block][row][32] in
    `memory`; `is_used` if that is worth it."""

    adapters: AdapterOperands
    rows: Value
    first: Value
    memory: Value
    is_used: Value

    @classmethod
    def of(cls, b: Builder, adapters: AdapterOperands, rows: Value, first: Value, groups: Value) -> AdaptedSpan:
        """Return the span of blocks from number `first` on, which is not used unless the rows are one group."""
        with b.loop(1, rows, state=[b.index(0)]) as row:
            before, number = (adapters.rows.number(b, row.index - back) for back in (1, 0))
            changes = b.convert("arith.extui", b.compare("ne", before, number), I64)
            row.carry(row.state[0] + changes)
        are_many = b.compare("sgt", row.results[0] * _ROWS_OF_AN_ADAPTER, rows)
        is_used = are_many & b.compare("eq", groups, 1) & (rows <= _SPAN_ROWS)
        return cls(adapters, rows, first, b.scratch(SPAN_BLOCKS * _BLOCK_BYTES), is_used)

    def totals(self, b: Builder, block: Value) -> Value:
        """Return the address of the products with a block of columns."""
        return b.address(self.memory, (block - self.first) * _BLOCK_BYTES)

    def finish(self, b: Builder, dtypes: Dtypes, blocks: Value, sink: ColumnSink) -> None:
        """Change the products with the first `blocks` blocks, and pass them to the sink."""
        with b.when(self.is_used):
            self._change(b, dtypes, blocks)
            with b.loop(self.first, self.first + blocks) as block:
                sink.take(b, block.index, b.index(0), self.rows, self.totals(b, block.index))

    def _change(self, b: Builder, dtypes: Dtypes, blocks: Value) -> None:
        """Change the products row by row. While a row is changed, what the next one reads is prefetched, and where that
        of the row after it lies."""
        adapters, last = self.adapters, self.rows - 1
        with b.loop(0, self.rows + 2) as step:
            rows = [(step.index - back).max(0).min(last) for back in range(3)]
            late, later, now = (adapters.entry(b, row) for row in rows)
            does_prefetch = adapters.has_changes(b, later) & b.compare("sge", step.index, 1) & (step.index <= self.rows)
            does_change = adapters.has_changes(b, now) & b.compare("sge", step.index, 2)
            with b.loop(0, blocks) as number:
                block = self.first + number.index
                adapters.prefetch_place(b, late, block)
                with b.when(does_prefetch):
                    adapters.prefetch_columns(b, dtypes, later, block)
                with b.when(does_change):
                    at = b.address(self.totals(b, block), rows[2] * (2 * LINE))
                    adapters.change(b, dtypes, [rows[2]], block, [at])


class SpanSink(ColumnSink):
    """Keeps products for a span that is used, and passes others to a sink."""

    def __init__(self, span: AdaptedSpan, sink: ColumnSink) -> None:
        self._span, self._sink = span, sink

    def __call__(self, block: Value, row: Value, values: Sequence[Value]) -> None:
        """See ColumnSink. Products of floats are all in memory."""
        raise NotImplementedError

    def take(self, b: Builder, block: Value, first: Value, count: Value, totals: Value) -> None:
        """See ColumnSink."""
        span = self._span
        with b.when(span.is_used):
            kept = b.address(span.totals(b, block), first * (2 * LINE))
            with b.loop(0, count * (2 * LINE), LINE) as line:
                b.store(b.load(totals, line.index, VF32, LINE), kept, line.index, LINE)
        with b.when(b.compare("eq", span.is_used, 0)):
            self._sink.take(b, block, first, count, totals)
