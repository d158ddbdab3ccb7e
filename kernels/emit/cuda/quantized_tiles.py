"""Products of many quantized rows with packed quantized weights on tensor cores: emit/quantized.py has the order.

A warp multiplies 16 rows by 32 columns, 32 k at a time, which is exact: four products of 16 x 32 bytes by 32 x 8. As
integer sums may have any order, a thread's k are those that lie together: of a row eight k, of four columns two fours
of k. It gets the sums of eight neighbouring columns in two rows, and scales them group by group in registers.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.kernels.emit.builder import F16, F32, I8, I16, I32, VF32, VI32, Value
from quire.kernels.emit.cuda.blocks import BlockBuilder
from quire.kernels.emit.dots import look_up
from quire.kernels.emit.layout import BLOCK, TILE_ROWS
from quire.kernels.emit.products import RowSink
from quire.kernels.emit.quantized import QuantizedProducts
from quire.kernels.emit.quantized_operands import LINE

COLUMNS = 8
"""Neighbouring columns whose sums a thread has."""

_HALVES = 2 * BLOCK  # bytes of an f16 or i16 for each column


@dataclass(frozen=True)
class _Lane:
    """A thread's place in its warp: two rows, `row` and `row` + 8, and eight columns, or two fours of k, of `part`."""

    row: Value
    part: Value


@dataclass(frozen=True)
class TileProducts(QuantizedProducts):
    """Emits products on tensor cores; all threads of a block must come here."""

    @property
    def totals_bytes(self) -> int:
        """Bytes of memory for the products of a row."""
        return BLOCK * 4

    def emit_tiles(self, b: BlockBuilder, x: Value, rows: Value, block: Value, totals: Value, sink: RowSink) -> None:
        """Call `sink` with each of `rows` rows, of which each warp has 16, times a block of 32 columns."""
        warp, lane = b.team // 2, _Lane(b.thread % 32 // 4, b.thread % 4)
        groups = self.format.groups(self.k) // self.shared
        panel = self.panel(b, x, warp * TILE_ROWS)
        last = b.select(warp * TILE_ROWS < rows, b.index(groups), b.index(0))
        with b.loop(0, last, state=[b.constant(0.0, F32)] * (2 * COLUMNS)) as group:
            sums = self._group_sums(b, panel, block, group.index, lane)
            totals_of = list(group.state)
            for part in range(self.shared):
                some = sums[part * 2 * COLUMNS : (part + 1) * 2 * COLUMNS]
                totals_of = self._scaled_tile(b, panel, block, group.index, part, lane, some, totals_of)
            group.carry(*totals_of)
        b.barrier()
        with b.when(warp * TILE_ROWS < rows):
            for r in range(2):
                target = b.address(totals, (warp * TILE_ROWS + lane.row + 8 * r) * self.totals_bytes + lane.part * 32)
                for i in range(0, COLUMNS, 4):
                    b.store_own(group.results[r * COLUMNS + i : r * COLUMNS + i + 4], target, 4 * i)
        with b.each(0, rows) as row:
            at = b.address(totals, row.index * self.totals_bytes)
            sink(row.index, [b.load(at, LINE * tile, VF32) for tile in range(2)])

    # Integer sums

    def _group_sums(self, b: BlockBuilder, panel: Value, block: Value, group: Value, lane: _Lane) -> list[Value]:
        """Return the sums of a group of activations, [group of weights][row][column]."""
        units = max(self.format.span(self.k) // BLOCK, 1)
        lines = self.lines(b, block, group * self.shared)
        # As the tensor cores have them: [group of weights][number of a product][row][first or last four columns].
        with b.loop(0, units, state=[b.constant(0, I32)] * (2 * COLUMNS * self.shared)) as unit:
            k = (group * units + unit.index) * BLOCK
            at = b.address(panel, k // LINE * (TILE_ROWS * LINE) + k % LINE + lane.row * LINE + lane.part * 8)
            upper, lower = (b.load_own(at, r * 8 * LINE, I32, 2, constant=True) for r in range(2))
            weights = b.address(lines, unit.index * (BLOCK * self.format.bits // 16 * LINE))
            fours = [self._four(b, weights, lane.part * 2 + i, lane.row) for i in range(2)]
            state: list[Value] = []
            for part in range(self.shared):
                for i in range(4):
                    columns = [self._of_part(b, four[i], part, lane) for four in fours]
                    sums = unit.state[part * 2 * COLUMNS + 4 * i : part * 2 * COLUMNS + 4 * i + 4]
                    state += b.multiply_tiles([upper[0], lower[0], upper[1], lower[1]], columns, sums)
            unit.carry(*state)
        return [
            unit.results[part * 2 * COLUMNS + column % 4 * 4 + r * 2 + column // 4]
            for part in range(self.shared)
            for r in range(2)
            for column in range(COLUMNS)
        ]

    def _of_part(self, b: BlockBuilder, word: Value, part: int, lane: _Lane) -> Value:
        """Return four k of a column, or zeros if they belong to another of the groups that share activations."""
        if self.shared == 1:
            return word
        return b.select(b.compare("eq", lane.part // 2, part), word, b.constant(0, I32))

    def _four(self, b: BlockBuilder, unit: Value, number: Value, columns: Value) -> list[Value]:
        """Return four k, number `number` of a unit, of four columns, from number 4 `columns` on."""
        values: list[Value] = [b.constant(0, I32)] * 4
        line, shift = 0, 0
        for plane in self.format.planes:
            each = 8 // plane
            at = b.address(unit, (number // each + line) * (2 * LINE) + columns * 16)
            words = b.load_own(at, 0, I32, 4, constant=True)
            if plane < 8:
                bits = b.convert("arith.trunci", number % each * plane, I32)
                words = [((word >> bits) & ((1 << plane) - 1) * 0x01010101) << shift for word in words]
            values = words if line == 0 else [value | word for value, word in zip(values, words, strict=True)]
            line, shift = line + plane, shift + plane
        if not self.format.codebook:
            return values
        found = (look_up(b, self.isa, tuple(self.format.codebook), b.as_lanes(value, VI32)) for value in values)
        return [b.as_lanes(value, I32) for value in found]

    # Scales

    def _scaled_tile(
        self, b: BlockBuilder, panel: Value, block: Value, x_group: Value, part: int, lane: _Lane, sums: list[Value],
        totals: list[Value],
    ) -> list[Value]:  # fmt: skip
        """Return `totals` plus the scaled sums of a group of weights, [row][column]."""
        group = x_group * self.shared + part
        header, column = self.header(b, block, group), lane.part * COLUMNS
        scales, mins = self._scales_of(b, header, group, column)
        zeros = self._shorts(b, header, self.format.header_bytes - LINE, column) if self.format.zeros else None
        results = []
        for r in range(2):
            x_scales = b.address(self.panel_scales(b, panel, x_group), (lane.row + 8 * r) * 4)
            scale, x_sum = b.load(x_scales, 0, F32), self.x_sum(b, x_scales, 0, part)
            subtracted = scale * b.convert("arith.sitofp", x_sum, F32) * -1.0 if mins else None
            for c in range(COLUMNS):
                exact = sums[r * COLUMNS + c]
                if zeros is not None:
                    exact = exact + zeros[c] * x_sum * -1
                elif self.middle:
                    exact = exact + x_sum * -self.middle
                total = b.fma(b.convert("arith.sitofp", exact, F32), scales[c] * scale, totals[r * COLUMNS + c])
                results.append(total if subtracted is None else b.fma(mins[c], subtracted, total))
        return results

    def _scales_of(
        self, b: BlockBuilder, header: Value, group: Value, column: Value
    ) -> tuple[list[Value], list[Value]]:
        """Load the scales and the minima, if there are any, of eight columns from number `column` on."""
        form = self.format
        if not form.group:
            at = b.address(header, column * 4)
            return [v for i in (0, 16) for v in b.load_own(at, i, F32, 4, constant=True)], []
        if form.scales == "e8m0":
            exponents = self._bytes_of(b, header, 0, group, column, "arith.extui")
            return [((e - 1).max(0) << 23).bitcast(F32) for e in exponents], []
        tables = [self._floats(b, header, _HALVES * i, column) for i in range(2 if form.mins else 1)]
        if form.scales == "super":
            place = _HALVES * len(tables)
            for i, extension in enumerate(("arith.extsi", "arith.extui")[: len(tables)]):
                numbers = self._bytes_of(b, header, place + i * form.super_groups * BLOCK, group, column, extension)
                factors = (b.convert("arith.sitofp", number, F32) for number in numbers)
                tables[i] = [d * factor for d, factor in zip(tables[i], factors, strict=True)]
        return tables[0], tables[1] if form.mins else []

    def _floats(self, b: BlockBuilder, header: Value, at: int, column: Value) -> list[Value]:
        words = b.load_own(b.address(header, column * 2), at, I32, 4, constant=True)
        halves = [b.convert("arith.trunci", word >> 16 * i if i else word, I16) for word in words for i in range(2)]
        return [b.convert("arith.extf", half.bitcast(F16), F32) for half in halves]

    def _shorts(self, b: BlockBuilder, header: Value, at: int, column: Value) -> list[Value]:
        words = b.load_own(b.address(header, column * 2), at, I32, 4, constant=True)
        return [b.shift_right_signed(word if i else word << 16, 16) for word in words for i in range(2)]

    def _bytes_of(
        self, b: BlockBuilder, header: Value, at: int, group: Value, column: Value, extension: str
    ) -> list[Value]:
        place = b.address(header, group % self.format.super_groups * BLOCK + at + column)
        numbers = (b.load(place, i, I8) for i in range(COLUMNS))
        return [b.convert(extension, number, I32) for number in numbers]
