"""Products of up to 16 quantized rows with packed quantized weights by a block of threads: emit/quantized.py has the
order.

Integer sums are exact in any order, so each half-warp computes those of some units of k for 32 columns, and leaves them
in shared memory. When it is full, a half-warp for each row adds up the units of every group and scales them, group by
group.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from quire.kernels.emit.builder import F32, I32, LANES, VF32, VI32, Builder, Value
from quire.kernels.emit.cuda.blocks import BlockBuilder
from quire.kernels.emit.cuda.products import THREADS
from quire.kernels.emit.cuda.quantized_tiles import MEMORY_BYTES, QuantizedTile
from quire.kernels.emit.dots import add_dots
from quire.kernels.emit.layout import BLOCK, TILE_ROWS
from quire.kernels.emit.products import ColumnSink, RowSink
from quire.kernels.emit.quantized import QuantizedProducts
from quire.kernels.emit.quantized_operands import LINE

ROWS_AT_ONCE = (1, 2, 4, 8)
"""Numbers of rows that are computed together."""

WIDEST = 4
"""Most blocks of columns of a tile."""

ITEMS_OF_WIDE_TILES = 256
"""Fewest items of which several have one tile: 64 tiles of four blocks of columns take as long on 132 multiprocessors
as 256 of one block, which share less of what they read."""

TEAMS = THREADS // LANES

_QUADS_AT_ONCE = 4  # fours of k whose weights are loaded before they are multiplied


@dataclass(frozen=True)
class _QuantizedRows:
    """Rows of x that are computed together: `count` of them from number `first` of the panel on, `wanted` of which
    matter; and the memory of their sums, i32 [unit][row][columns]."""

    panel: Value
    first: Value
    wanted: Value
    count: int
    sums: Value


@dataclass(frozen=True)
class BlockQuantizedProducts(QuantizedProducts):
    """Emits products by a block of threads, which must all come here, or up to 16 rows by `parts` blocks, 1 or 2."""

    parts: int = 1

    @property
    def step(self) -> int:
        """Elements of k of a unit, which lie together in a panel and are part of one group, or are two groups."""
        return min(self.format.span(self.k), LINE) if self.is_direct else BLOCK

    @property
    def units(self) -> int:
        """Units of a group of activations."""
        return max(self.format.span(self.k) // self.step, 1)

    def emit_item(
        self, b: Builder, x: Value, rows: Value, block: Value, count: int, columns: Callable[[Value], Value],
        sink: ColumnSink, items: Value,
    ) -> None:  # fmt: skip
        """See QuantizedProducts; of more than 16 rows, if there are enough items, one multiplies by several blocks.

        Of two blocks of threads each multiplies up to 16 rows by a tile of 16 columns, and the first one more rows.
        """
        assert isinstance(b, BlockBuilder)
        with b.when(rows <= TILE_ROWS):
            mine = self if self.parts == 1 else replace(self, tiles=(b.part,))
            mine.emit(b, x, rows, columns(block), sink.of(block * self.parts + b.part))
        is_many = b.compare("sgt", rows, TILE_ROWS) & b.compare("eq", b.part, 0)
        across = WIDEST // 2 if self.format.group else WIDEST
        is_first = (items >= ITEMS_OF_WIDE_TILES) & b.compare("eq", block % across, 0)
        for blocks, some in ((across, is_first), (1, items < ITEMS_OF_WIDE_TILES)):
            with b.when(is_many & some):
                memory = b.in_turn(MEMORY_BYTES)
                tile = QuantizedTile(self.format, self.k, self.isa, blocks, memory, x, rows, block, count, columns)
                tile.emit(b, sink)

    def emit(self, b: Builder, x: Value, rows: Value, block: Value, sink: RowSink) -> None:
        """See QuantizedProducts; of at most 16 rows."""
        assert isinstance(b, BlockBuilder)
        sums, least = b.in_turn(MEMORY_BYTES), 0
        for count in ROWS_AT_ONCE:
            with b.when(b.compare("sgt", rows, least) & b.compare("sle", rows, count)):
                self._rows(b, _QuantizedRows(x, b.index(0), rows, count, sums), block, sink)
            least = count
        with b.when(b.compare("sgt", rows, least)), b.loop(0, rows, least) as first:
            wanted = (rows - first.index).min(least)
            self._rows(b, _QuantizedRows(x, first.index, wanted, least, sums), block, sink)

    def _rows(self, b: BlockBuilder, rows: _QuantizedRows, block: Value, sink: RowSink) -> None:
        most = MEMORY_BYTES // (rows.count * self._unit_bytes)
        groups = self.format.groups(self.k) // self.shared
        zero = [b.constant(0.0, VF32)] * len(self.tiles)
        none = [b.constant(0, VI32)] * (len(self.tiles) * self.shared)
        if self.units <= most:
            at_once = most // self.units
            with b.loop(0, groups, at_once, state=zero) as start:
                stop = (start.index + at_once).min(groups)
                self._sum_units(b, rows, block, start.index * self.units, stop * self.units)
                last = b.select(b.team < rows.wanted, stop, start.index)
                with b.loop(start.index, last, state=start.state) as group:
                    first = (group.index - start.index) * self.units
                    sums = self._add_units(b, rows, first, first + self.units, none)
                    group.carry(*self._add_group(b, rows, block, group.index, sums, group.state))
                start.carry(*group.results)
                b.barrier()
        else:
            with b.loop(0, groups, state=zero) as start:
                begin, end = start.index * self.units, (start.index + 1) * self.units
                with b.loop(begin, end, most, state=none) as part:
                    stop = (part.index + most).min(end)
                    self._sum_units(b, rows, block, part.index, stop)
                    part.carry(*self._add_units(b, rows, b.index(0), stop - part.index, part.state))
                    b.barrier()
                start.carry(*self._add_group(b, rows, block, start.index, part.results, start.state))
        with b.when(b.team < rows.wanted), b.by_team():
            sink(rows.first + b.team, start.results)

    @property
    def _unit_bytes(self) -> int:
        """Return the bytes of the sums of a unit and a row."""
        return self.shared * self._row_bytes

    @property
    def _row_bytes(self) -> int:
        """Return the bytes of the sums of a group of weights in a unit and a row."""
        return len(self.tiles) * LINE

    def _sum_units(self, b: BlockBuilder, rows: _QuantizedRows, block: Value, first: Value, stop: Value) -> None:
        """Store the sums of units [first, stop), each by a half-warp, and wait for all of them."""
        with b.loop(first + b.team, stop, TEAMS) as unit:
            group, within = unit.index // self.units, unit.index % self.units
            weights = b.address(
                self.lines(b, block, group * self.shared), within * (self.step * self.format.bits // 16 * LINE)
            )
            k = unit.index * self.step
            x = b.address(rows.panel, k // LINE * (TILE_ROWS * LINE) + k % LINE + rows.first * LINE)
            target = b.address(rows.sums, (unit.index - first) * (rows.count * self._unit_bytes))
            for part in range(self.shared):
                quads = self.step // 4 // self.shared
                for i, value in enumerate(self._unit_sums(b, x, weights, rows.count, part * quads, quads)):
                    row, tile = divmod(i, len(self.tiles))
                    b.store_lanes(value, target, row * self._unit_bytes + part * self._row_bytes + tile * LINE)
        b.barrier()

    def _unit_sums(self, b: BlockBuilder, x: Value, unit: Value, count: int, first: int, quads: int) -> list[Value]:
        """Return the sums of `quads` fours of k, from number `first` of a unit on, for each row and tile."""
        sums = [b.constant(0, VI32)] * (len(self.tiles) * count)
        for start in range(first, first + quads, _QUADS_AT_ONCE):
            tiles = [self.quads(b, unit, tile, start, _QUADS_AT_ONCE) for tile in self.tiles]
            for r in range(count):
                for i, word in enumerate(b.load_own(x, r * LINE + start * 4, I32, _QUADS_AT_ONCE, constant=True)):
                    for tile, words in enumerate(tiles):
                        number = len(tiles) * r + tile
                        sums[number] = add_dots(b, self.isa, sums[number], words[i], b.broadcast(word))
        return sums

    def _add_units(
        self, b: BlockBuilder, rows: _QuantizedRows, first: Value, stop: Value, sums: list[Value]
    ) -> list[Value]:
        """Add units [first, stop) of those in memory to a row's sums, for each group that they have."""
        row = b.team.min(rows.count - 1)
        mine = b.address(rows.sums, row * self._unit_bytes)
        with b.loop(first, stop, state=sums) as unit:
            at = b.address(mine, unit.index * (rows.count * self._unit_bytes))
            unit.carry(*(total + b.load(at, i * LINE, VI32) for i, total in enumerate(unit.state)))
        return unit.results

    def _add_group(
        self, b: BlockBuilder, rows: _QuantizedRows, block: Value, group: Value, sums: list[Value], totals: list[Value]
    ) -> list[Value]:
        """Return `totals` plus a row's scaled sums of a group of activations."""
        row = rows.first + b.team.min(rows.count - 1)
        x_scales = b.address(self.panel_scales(b, rows.panel, group), row * 4)
        scale = b.load(x_scales, 0, F32)
        for part in range(self.shared):
            number = group * self.shared + part
            header, x_sum = self.header(b, block, number), self.x_sum(b, x_scales, 0, part)
            start = self.start(b, header, b.broadcast(x_sum))
            some = sums[part * len(start) : (part + 1) * len(start)]
            exact = [a + s for a, s in zip(some, start, strict=True)]
            totals = self.add_scaled(b, header, number, exact, scale, x_sum, totals)
        return totals
