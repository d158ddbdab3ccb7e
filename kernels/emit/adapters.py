"""Low-rank changes of linear layers, chosen row by row: y = (W x + B s) * factor, with a factor for each column.

Each product has a table of adapters, which may be filled between steps. The first entry is that of rows without an
adapter, and is empty, as those of adapters that do not change the product's layers. ShrinkKernel (shrink.py) computes
the short vectors s = scale * A x + offset, and the product changes its results so before all else that is done with
them. An adapter's own biases take the place of the base's.

A row's sums depend on its own adapter alone. Those of A x run over k modulo 4 in four chains, (0 + 1) + (2 + 3), and
those of B s over the even and the odd ranks. Groups of rows that have one adapter share the loads of A and B where the
registers hold their sums.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from quire.kernels.emit.builder import F32, I64, PTR, VF32, Builder, Value
from quire.kernels.emit.context import EmitContext
from quire.kernels.emit.dots import is_narrow
from quire.kernels.emit.layout import PAIRS, Dtypes, load_pair
from quire.kernels.emit.products import LINE, ColumnSink

ENTRY_BYTES = 40
"""Bytes of an adapter in a table: i64 addresses of A, of the scales and of the columns, the number of tiles of A, and
the address of the biases, f32 of all columns, 0 if they are the base's.

A is packed as weights are, in tiles of 16 ranks; the scales are f32 [tiles][2][16], 16 factors and 16 offsets each.
"""

COLUMNS_BYTES = 32
"""Bytes of a tile of 16 columns of an adapter: i64 addresses of its part of B, packed in pairs of ranks, and of 16
f32 factors, the index in s of its first rank, and its number of pairs of ranks."""

EXPANDED_ROWS = 8
"""Rows of one adapter that are multiplied by B together with vector registers of 16 lanes."""


def rows_at_once(isa: str, most: int) -> int:
    """Return how many rows of one adapter are multiplied together: at most so many, whose sums the registers hold."""
    return 1 if is_narrow(isa) else most


@dataclass(frozen=True)
class RowAdapters:
    """Addresses of the adapters of a step's rows, i32 [tokens], and, for rows that are gathered from these, of their
    numbers, i32."""

    adapters: Value
    gathered: Value | None = None

    def number(self, b: Builder, row: Value) -> Value:
        """Return the number of a row's adapter."""
        return b.load_index(self.adapters, row if self.gathered is None else b.load_index(self.gathered, row))

    def grouped(self, b: Builder, first: Value, size: int, end: Value, compute: Callable[[Value, int], None]) -> None:
        """Call `compute` with the first of `size` rows and their number if they are below `end` and have one adapter,
        or else with each of those below `end` and 1."""
        if size == 1:
            compute(first, 1)
            return
        are_equal, number = first + size <= end, self.number(b, first)
        for i in range(1, size):
            other = self.number(b, (first + i).min(end - 1))
            are_equal = are_equal & b.compare("eq", number, other)
        with b.when(are_equal):
            compute(first, size)
        with b.when(b.compare("eq", are_equal, 0)), b.loop(first, (first + size).min(end)) as row:
            compute(row.index, 1)


@dataclass(frozen=True)
class AdapterOperands:
    """The adapters of rows, and addresses of a product's table and of the short vectors, of `tiles` tiles each."""

    rows: RowAdapters
    table: Value
    short: Value
    tiles: int

    def entry(self, b: Builder, row: Value) -> Value:
        """Return the address of the entry of a row's adapter."""
        return b.address(self.table, self.rows.number(b, row) * ENTRY_BYTES)

    def has_changes(self, b: Builder, entry: Value) -> Value:
        """Return whether the adapter of an entry has ranks."""
        return b.compare("ne", b.load(entry, 24, I64), 0)

    def biases(self, b: Builder, row: Value, base: Value) -> Value:
        """Return the address of a row's biases, which are at `base` unless its adapter has some of its own."""
        entry = self.entry(b, row)
        return b.select(b.compare("ne", b.load(entry, 32, I64), 0), b.load(entry, 32, PTR), base)

    def prefetch(self, b: Builder, dtypes: Dtypes, first: Value, count: Value, block: Value) -> None:
        """Prefetch what changes of rows read for a block of columns, and where that of the next block lies.

        Rows with adapters of their own read short pieces of memory, and would wait for each of them.
        """
        with b.loop(first, first + count, state=[b.index(0)]) as row:
            number = self.rows.number(b, row.index)
            entry = b.address(self.table, number * ENTRY_BYTES)
            with b.when(b.compare("ne", number, row.state[0]) & self.has_changes(b, entry)):
                self.prefetch_place(b, entry, block + 1)
                self.prefetch_columns(b, dtypes, entry, block)
            row.carry(number)

    def prefetch_place(self, b: Builder, entry: Value, block: Value) -> None:
        """Prefetch where an adapter's columns of a block lie."""
        b.prefetch(b.load(entry, 16, PTR), block * (2 * COLUMNS_BYTES), level=1)

    def prefetch_columns(self, b: Builder, dtypes: Dtypes, entry: Value, block: Value) -> None:
        """Prefetch what an adapter that has changes reads for a block of columns."""
        pair_bytes = dtypes.plain.tile_bytes // PAIRS
        columns = b.address(b.load(entry, 16, PTR), block * (2 * COLUMNS_BYTES))
        for i in range(2):
            weights = b.load(columns, i * COLUMNS_BYTES, PTR)
            size = b.load(columns, i * COLUMNS_BYTES + 24, I64) * pair_bytes
            with b.loop(0, size, LINE) as line:
                b.prefetch(weights, line.index, level=2)

    def apply(self, b: Builder, dtypes: Dtypes, row: Value, block: Value, values: Sequence[Value]) -> list[Value]:
        """Return the products of a row with block number `block` of the columns, changed by the row's adapter."""
        entry = self.entry(b, row)
        with b.loop(0, b.load(entry, 24, I64).min(1), state=values) as once:  # not at all without an adapter
            once.carry(*self._changed(b, dtypes, entry, [row], block, [once.state])[0])
        return once.results

    def apply_to(
        self, b: Builder, context: EmitContext, first: Value, count: Value, block: Value, totals: Value
    ) -> None:
        """Change the products of `count` rows from number `first` on with a block of columns, f32 [row][32]."""

        def change(row: Value, size: int) -> None:
            with b.when(self.has_changes(b, self.entry(b, row))):
                rows = [row + i for i in range(size)]
                self.change(
                    b, context.dtypes, rows, block, [b.address(totals, (one - first) * (2 * LINE)) for one in rows]
                )

        size = rows_at_once(context.isa, EXPANDED_ROWS)
        with b.loop(first, first + count, size) as start:
            self.rows.grouped(b, start.index, size, first + count, change)

    def change(self, b: Builder, dtypes: Dtypes, rows: Sequence[Value], block: Value, places: Sequence[Value]) -> None:
        """Change the products of rows of one adapter, which has changes, with a block of columns, f32 [32] at each of
        `places`."""
        values = [[b.load(place, LINE * i, VF32, LINE) for i in range(2)] for place in places]
        changed = self._changed(b, dtypes, self.entry(b, rows[0]), rows, block, values)
        for place, both in zip(places, changed, strict=True):
            for i, value in enumerate(both):
                b.store(value, place, LINE * i, LINE)

    def _changed(
        self, b: Builder, dtypes: Dtypes, entry: Value, rows: Sequence[Value], block: Value,
        values: Sequence[Sequence[Value]],
    ) -> list[list[Value]]:  # fmt: skip
        """Return the products of each row with a block of as many columns as it has values, as an adapter changes
        them."""
        tiles = len(values[0])
        columns = b.address(b.load(entry, 16, PTR), block * (tiles * COLUMNS_BYTES))
        shorts = [b.address(self.short, row * (self.tiles * 64)) for row in rows]
        changed: list[list[Value]] = [[] for _ in rows]
        for i in range(tiles):
            at = b.address(columns, i * COLUMNS_BYTES)
            weights, first = b.load(at, 0, PTR), b.load(at, 16, I64) * 4
            sources = [b.address(short, first) for short in shorts]
            with b.loop(0, b.load(at, 24, I64), state=[b.constant(0.0, VF32)] * (2 * len(rows))) as pair:
                ranks, sums = load_pair(b, dtypes.plain, weights, pair.index), list(pair.state)
                for number, total in enumerate(sums):
                    value = b.load(sources[number // 2], pair.index * 8 + number % 2 * 4, F32)
                    sums[number] = b.fma(b.broadcast(value), ranks[number % 2], total)
                pair.carry(*sums)
            factors = b.load(b.load(at, 8, PTR), 0, VF32, 64)
            for r, both in enumerate(changed):
                even, odd = pair.results[2 * r : 2 * r + 2]
                both.append((values[r][i] + (even + odd)) * factors)
        return changed


class AdaptingSink(ColumnSink):
    """Takes products of rows from number `first` on, and passes to `sink` what their adapters make of them."""

    def __init__(
        self, b: Builder, context: EmitContext, adapters: AdapterOperands, first: Value, sink: ColumnSink
    ) -> None:
        self._b, self._context, self._adapters, self._first, self._sink = b, context, adapters, first, sink

    def __call__(self, block: Value, row: Value, values: Sequence[Value]) -> None:
        """See ColumnSink."""
        changed = self._adapters.apply(self._b, self._context.dtypes, self._first + row, block, values)
        self._sink(block, row, changed)

    def take(self, b: Builder, block: Value, first: Value, count: Value, totals: Value) -> None:
        """See ColumnSink."""
        self._adapters.apply_to(b, self._context, self._first + first, count, block, totals)
        self._sink.take(b, block, first, count, totals)
