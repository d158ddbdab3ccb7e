"""Low-rank changes of linear layers, chosen row by row: y += B (scale * A x + offset), times a factor of each column.

Each product has a table of adapters, which may be filled between steps. The first entry is that of rows without an
adapter, and is empty, as those of adapters that do not change the product's layers. ShrinkKernel computes the short
vectors s = scale * A x + offset, and the product adds B s before all else that is done with its results. An adapter's
own biases take the place of the base's.

A row's sums depend on its own adapter alone. Those of A x run over k modulo 4 in four chains, (0 + 1) + (2 + 3), and
those of B s over the even and the odd ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quire.kernels._native import CACHE_LINE
from quire.kernels.emit.builder import F32, I64, PTR, VF32, Builder, Value
from quire.kernels.emit.context import EmitContext, Kernel
from quire.kernels.emit.layout import (
    BLOCK,
    PAIRS,
    TILE_ROWS,
    Dtypes,
    load_activation,
    load_pair,
    packed_offset,
    round_up,
)

ENTRY_BYTES = 40
"""Bytes of an adapter in a table: i64 addresses of A, of the scales and of the columns, the number of tiles of A, and
the address of the biases, f32 of all columns, 0 if they are the base's.

A is packed as weights are, in tiles of 16 ranks; the scales are f32 [tiles][2][16], 16 factors and 16 offsets each.
"""

COLUMNS_BYTES = 32
"""Bytes of a tile of 16 columns of an adapter: i64 addresses of its part of B, packed in pairs of ranks, and of 16
f32 factors, the index in s of its first rank, and its number of pairs of ranks."""


@dataclass(frozen=True)
class RowAdapters:
    """Addresses of the adapters of a step's rows, i32 [tokens], and, for rows that are gathered from these, of their
    numbers, i32."""

    adapters: Value
    gathered: Value | None = None

    def number(self, b: Builder, row: Value) -> Value:
        """Return the number of a row's adapter."""
        return b.load_index(self.adapters, row if self.gathered is None else b.load_index(self.gathered, row))


@dataclass(frozen=True)
class ShrinkKernel(Kernel):
    """The short vectors of rows that have adapters.

    Work items are `tiles` tiles of 16 ranks times rows, those of a tile one after the other. Buffers: x (packed
    activations of `k` columns), the adapters of a step's rows, i32, with `head` the numbers of those that have logits,
    which then are the rows of x, the table, s f32 [m, 16 * tiles].
    """

    k: int
    tiles: int
    head: bool = False

    @property
    def shape(self) -> str:
        """See Kernel."""
        return f"{self.k} x {self.tiles * TILE_ROWS}"

    def build(self, b: Builder, context: EmitContext) -> None:
        """See Kernel."""
        x, adapters, *gathered, table, out = (b.buffer(i) for i in range(4 + self.head))
        rows, count = RowAdapters(adapters, *gathered), b.dim("logit_rows" if self.head else "tokens")
        with b.items() as item:
            tile, row = item // count, item % count
            entry = b.address(table, rows.number(b, row) * ENTRY_BYTES)
            with b.when(tile < b.load(entry, 24, I64)):
                self._shrink(b, context.dtypes, x, row, entry, tile, b.address(out, row * (self.tiles * 64)))

    def _shrink(self, b: Builder, dtypes: Dtypes, x: Value, row: Value, entry: Value, tile: Value, out: Value) -> None:
        """Store a tile of the short vector, which is at `out`, of a row of x."""
        plain, blocks = dtypes.plain, round_up(self.k, BLOCK) // BLOCK
        weights = b.address(b.load(entry, 0, PTR), tile * (blocks * plain.tile_bytes))
        with b.loop(0, blocks, state=[b.constant(0.0, VF32)] * 4) as block:
            source = packed_offset(dtypes, self.k, row, block.index * BLOCK)
            sums = list(block.state)
            for pair in range(BLOCK // 2):
                columns = load_pair(b, plain, b.address(weights, block.index * plain.tile_bytes), b.index(pair))
                for i, column in enumerate(columns):
                    k = 2 * pair + i
                    value = load_activation(b, dtypes, x, source + k * dtypes.activation_bytes, 1)
                    sums[k % 4] = b.fma(b.broadcast(value), column, sums[k % 4])
            block.carry(*sums)
        total = (block.results[0] + block.results[1]) + (block.results[2] + block.results[3])
        scales = b.address(b.load(entry, 8, PTR), tile * 128)
        total = b.fma(total, b.load(scales, 0, VF32, 64), b.load(scales, 64, VF32, 64))
        b.store(total, out, tile * 64, 64)


@dataclass(frozen=True)
class AdapterOperands:
    """The adapters of rows, and addresses of a product's table and of the short vectors, of `tiles` tiles each."""

    rows: RowAdapters
    table: Value
    short: Value
    tiles: int

    def _entry(self, b: Builder, row: Value) -> Value:
        return b.address(self.table, self.rows.number(b, row) * ENTRY_BYTES)

    def biases(self, b: Builder, row: Value, base: Value) -> Value:
        """Return the address of a row's biases, which are at `base` unless its adapter has some of its own."""
        entry = self._entry(b, row)
        return b.select(b.compare("ne", b.load(entry, 32, I64), 0), b.load(entry, 32, PTR), base)

    def prefetch(self, b: Builder, dtypes: Dtypes, first: Value, count: Value, block: Value) -> None:
        """Prefetch what `apply` reads for rows and a block of columns, and where that of the next block lies.

        Rows with adapters of their own read short pieces of memory, and would wait for each of them.
        """
        pair_bytes = dtypes.plain.tile_bytes // PAIRS
        with b.loop(first, first + count) as row:
            entry = self._entry(b, row.index)
            with b.loop(0, b.load(entry, 24, I64).min(1)):  # not at all without an adapter
                columns = b.address(b.load(entry, 16, PTR), block * (2 * COLUMNS_BYTES))
                b.prefetch(columns, 2 * COLUMNS_BYTES, level=1)
                for i in range(2):
                    weights = b.load(columns, i * COLUMNS_BYTES, PTR)
                    size = b.load(columns, i * COLUMNS_BYTES + 24, I64) * pair_bytes
                    with b.loop(0, size, CACHE_LINE) as line:
                        b.prefetch(weights, line.index, level=2)

    def apply(self, b: Builder, dtypes: Dtypes, row: Value, block: Value, values: Sequence[Value]) -> list[Value]:
        """Return the products of a row with block number `block` of the columns, changed by the row's adapter."""
        plain = dtypes.plain
        entry = self._entry(b, row)
        short = b.address(self.short, row * (self.tiles * 64))
        with b.loop(0, b.load(entry, 24, I64).min(1), state=values) as once:  # not at all without an adapter
            columns = b.address(b.load(entry, 16, PTR), block * (2 * COLUMNS_BYTES))
            changed = []
            for i, value in enumerate(once.state):
                at = b.address(columns, i * COLUMNS_BYTES)
                weights, source = b.load(at, 0, PTR), b.address(short, b.load(at, 16, I64) * 4)
                with b.loop(0, b.load(at, 24, I64), state=[b.constant(0.0, VF32)] * 2) as pair:
                    ranks = load_pair(b, plain, weights, pair.index)
                    factors = (b.broadcast(b.load(source, pair.index * 8 + 4 * j, F32)) for j in range(2))
                    pair.carry(*map(b.fma, factors, ranks, pair.state))
                total = value + (pair.results[0] + pair.results[1])
                changed.append(total * b.load(b.load(at, 8, PTR), 0, VF32, 64))
            once.carry(*changed)
        return once.results
