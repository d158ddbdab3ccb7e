"""Single columns of packed quantized weights, as the rows of an embedding are read."""

from __future__ import annotations

from dataclasses import dataclass

from quire.kernels.emit.builder import F16, F32, I8, I32, Builder, Value, vector
from quire.kernels.emit.layout import BLOCK
from quire.kernels.emit.quantized_operands import LINE, QuantizedOperands

_QUAD = vector(I32, 4)


@dataclass(frozen=True)
class QuantizedRow(QuantizedOperands):
    """Columns of packed weights without zero points, read one at a time."""

    def codebook(self, b: Builder) -> Value | None:
        """Return the address of the codebook's values, i32 [16], if there is one."""
        if not self.format.codebook:
            return None
        table = b.scratch(LINE)
        with b.once():
            b.store(b.table(self.format.codebook, I32), table, 0, LINE)
        return table

    def unit(self, b: Builder, block: Value, number: Value) -> Value:
        """Return the address of a unit of 32 k."""
        span = self.format.span(self.k)
        group = number * BLOCK // span
        inside = number % (span // BLOCK) if span > BLOCK else b.index(0)
        return b.address(self.lines(b, block, group), inside * (self.format.bits * 2 * LINE))

    def scale_and_minimum(self, b: Builder, block: Value, group: Value, column: Value) -> tuple[Value, Value | None]:
        """Return the scale and the minimum of a group of one column, in four lanes."""
        header, form = self.header(b, block, group), self.format
        if not form.group:
            return b.broadcast(b.load(header, column * 4, F32), 4), None
        if form.scales == "e8m0":
            exponent = self._byte(b, header, 0, group, column, "arith.extui")
            return b.broadcast(((exponent - 1).max(0) << 23).bitcast(F32), 4), None
        half = 2 * BLOCK
        numbers = [self._half(b, header, half * i, column) for i in range(2 if form.mins else 1)]
        if form.scales == "super":
            table = half * len(numbers)
            for i, extension in enumerate(("arith.extsi", "arith.extui")[: len(numbers)]):
                byte = self._byte(b, header, table + i * form.super_groups * BLOCK, group, column, extension)
                numbers[i] = numbers[i] * b.convert("arith.sitofp", byte, F32)
        scale, *least = (b.broadcast(number, 4) for number in numbers)
        return scale, least[0] if least else None

    def quad(self, b: Builder, unit: Value, column: Value, number: Value, table: Value | None) -> Value:
        """Return the values of four k, number `number` of the unit, as i32 lanes."""
        value, line, shift = b.constant(0, _QUAD), 0, 0
        for plane in self.format.planes:
            each = 8 // plane
            at = (number // each + line) * (2 * LINE) + column * 4
            word = b.convert("arith.extui", b.load(unit, at, vector(I8, 4), 4), _QUAD)
            bits = b.broadcast(b.convert("arith.trunci", number % each * plane, I32), 4)
            value = value | ((word >> bits) & (1 << plane) - 1) << shift
            line, shift = line + plane, shift + plane
        if table is None:
            return value
        for lane in range(4):
            found = b.load(table, b.convert("arith.extui", b.lane(value, lane), "i64") * 4, I32)
            value = b.with_lane(value, lane, found)
        return value

    @staticmethod
    def _half(b: Builder, header: Value, at: int, column: Value) -> Value:
        return b.convert("arith.extf", b.load(header, column * 2 + at, F16), F32)

    def _byte(self, b: Builder, header: Value, at: int, group: Value, column: Value, extension: str) -> Value:
        place = group % self.format.super_groups * BLOCK + at
        return b.convert(extension, b.load(header, place + column, I8), I32)
