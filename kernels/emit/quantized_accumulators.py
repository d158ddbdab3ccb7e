"""Sums and results of quantized products in scratch memory, for registers of 8 lanes.

Both are [row][32 columns]. Sums are int32, of the parts of a group; results are the scaled sums of all groups, f32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quire.kernels.emit.builder import F32, I32, VF32, VI32, Builder, Value, vector
from quire.kernels.emit.quantized_operands import LINE, DotOperands

LANES, REGISTER = 8, 32
"""Lanes and bytes of a register."""
VECTORS = 2
"""Registers of a tile's 16 columns."""
FLOATS, INTS = vector(F32, LANES), vector(I32, LANES)


@dataclass(frozen=True)
class Accumulators:
    """Sums and results of some rows, and the scales and zero points of the current group.

    Values of consecutive rows are passed as the registers of one tile, those of each row together.
    """

    operands: DotOperands
    sums: Value
    results: Value
    scales: Value
    zeros: Value
    mins: Value

    @classmethod
    def reserve(cls, b: Builder, operands: DotOperands, rows: int) -> Accumulators:
        """Reserve memory for `rows` rows."""
        return cls(operands, *(b.scratch(size * 2 * LINE) for size in (rows, rows, 1, 1, 1)))

    def clear_sums(self, b: Builder, rows: Value) -> None:
        """Set the sums of `rows` rows to 0."""
        self._clear(b, self.sums, rows)

    def clear_results(self, b: Builder, rows: Value) -> None:
        """Set the results of `rows` rows to 0."""
        self._clear(b, self.results, rows)

    def result(self, b: Builder, row: Value) -> list[Value]:
        """Return the two vectors of 16 columns of a row's results."""
        at = self._cell(b, self.results, row, 0)
        return [b.load(at, tile * LINE, VF32, LINE) for tile in range(2)]

    def open_group(self, b: Builder, header: Value, group: Value) -> None:
        """Take the scales, zero points and minima of a group, which are in the header at `header`."""
        operands = self.operands
        tables = [(self.scales, operands.scales(b, header, group))]
        if operands.format.zeros:
            tables.append((self.zeros, operands.zeros(b, header)))
        if operands.format.mins:
            tables.append((self.mins, operands.mins(b, header, group)))
        for table, values in tables:
            for tile, value in enumerate(values):
                b.store(value, table, tile * LINE, LINE)

    def add(self, b: Builder, row: Value, tile: int, values: Sequence[Value]) -> None:
        """Add int32 values to the sums of consecutive rows from `row` on."""
        base = self._cell(b, self.sums, row, tile)
        for i, value in enumerate(values):
            at = self._offset(i)
            b.store(b.load(base, at, INTS, REGISTER) + value, base, at, REGISTER)

    def add_scaled(
        self, b: Builder, x_scales: Value, part: int, row: Value, tile: int, values: Sequence[Value]
    ) -> None:
        """Add the group's sums `values`, scaled, to the results of consecutive rows from `row` on.

        `x_scales` is the address of the first row's scale; `part` numbers the groups that share it.
        """
        base, form = self._cell(b, self.results, row, tile), self.operands.format
        for r in range(len(values) // VECTORS):
            x_sum, x_scale = self.operands.x_sum(b, x_scales, r, part), b.load(x_scales, r * 4, F32)
            subtracted = (
                b.broadcast(x_scale * b.convert("arith.sitofp", x_sum, F32) * -1.0, LANES) if form.mins else None
            )
            sums, factor = b.broadcast(x_sum, LANES), b.broadcast(x_scale, LANES)
            for v, value in enumerate(values[r * VECTORS : (r + 1) * VECTORS]):
                column, at = tile * LINE + v * REGISTER, self._offset(r * VECTORS + v)
                zero: Value | int = b.load(self.zeros, column, INTS, REGISTER) if form.zeros else self.operands.middle
                exact = value if zero == 0 else value - sums * zero
                scale = b.load(self.scales, column, FLOATS, REGISTER) * factor
                total = b.fma(b.convert("arith.sitofp", exact, FLOATS), scale, b.load(base, at, FLOATS, REGISTER))
                if subtracted is not None:
                    total = b.fma(b.load(self.mins, column, FLOATS, REGISTER), subtracted, total)
                b.store(total, base, at, REGISTER)

    def add_scaled_sums(self, b: Builder, x_scales: Value, part: int, row: Value) -> None:
        """Add a row's sums, scaled, to its results."""
        for tile in range(2):
            at = self._cell(b, self.sums, row, tile)
            values = [b.load(at, v * REGISTER, INTS, REGISTER) for v in range(VECTORS)]
            self.add_scaled(b, x_scales, part, row, tile, values)

    def _clear(self, b: Builder, table: Value, rows: Value) -> None:
        with b.loop(0, rows) as row:
            for tile in range(2):
                b.store(b.constant(0, VI32), self._cell(b, table, row.index, tile), 0, LINE)

    @staticmethod
    def _cell(b: Builder, table: Value, row: Value, tile: int) -> Value:
        return b.address(table, row * (2 * LINE) + tile * LINE)

    @staticmethod
    def _offset(number: int) -> int:
        return number // VECTORS * (2 * LINE) + number % VECTORS * REGISTER
