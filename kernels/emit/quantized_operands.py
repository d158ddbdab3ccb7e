"""Addresses, values and scales of the operands of quantized products (layout.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from quire.kernels import _native
from quire.kernels.emit.builder import F16, F32, I8, I16, I32, VF32, VI32, Builder, Value, vector
from quire.kernels.emit.dots import is_neon, look_up
from quire.kernels.emit.layout import BLOCK, TILE_ROWS, QuantizedFormat

LINE = _native.CACHE_LINE
QUADS = BLOCK // 4
"""Fours of k in a unit of 32, which is stored together."""

_HALVES = 2 * BLOCK  # bytes of an f16 or i16 for each column


@dataclass(frozen=True)
class QuantizedOperands:
    """Quantized activations and columns of `k` elements, in `tiles` of a block of columns: in both, or in one."""

    format: QuantizedFormat
    k: int
    tiles: Sequence[Value | int] = field(default=(0, 1), kw_only=True)

    @property
    def shared(self) -> int:
        """Number of groups of weights that share a group of activations."""
        return 2 if self.format.group == 16 else 1

    # Activations

    def panel(self, b: Builder, x: Value, row: Value) -> Value:
        """Return the address of the panel of x that starts with `row`."""
        return b.address(x, row // TILE_ROWS * self.format.panel_bytes(self.k))

    def panel_scales(self, b: Builder, panel: Value, group: Value) -> Value:
        """Return the address of a group's scales of the 16 rows of a panel; their sums follow.

        `group` counts groups of activations.
        """
        words = self.format.activation_words * TILE_ROWS * 4
        return b.address(panel, group * words + TILE_ROWS * self.format.depth(self.k))

    def x_sum(self, b: Builder, x_scales: Value, row: int, part: int) -> Value:
        """Return the sum of x over a group of weights, number `part` of those that share the scales at `x_scales`."""
        total = b.load(x_scales, (TILE_ROWS + row) * 4, I32)
        if self.shared == 1:
            return total
        first = b.load(x_scales, (2 * TILE_ROWS + row) * 4, I32)
        return first if part == 0 else total - first

    # Headers of weights

    def header(self, b: Builder, block: Value, group: Value) -> Value:
        """Return the address of the header that has a group's scales, in a block of columns."""
        return b.address(block, group // self.format.super_groups * self.format.super_bytes(self.k))

    def lines(self, b: Builder, block: Value, group: Value) -> Value:
        """Return the address of the unit of 32 k with which the values of a group begin, or in which they are."""
        header = self.header(b, block, group)
        number = group % self.format.super_groups if self.format.super_groups > 1 else b.index(0)
        first = number // self.shared * (self.format.value_bytes(self.k) * self.shared)
        return b.address(header, first + self.format.header_bytes)

    def scales(self, b: Builder, header: Value, group: Value) -> list[Value]:
        """Load the scales of a group's tiles."""
        if not self.format.group:
            return [b.load(header, tile * LINE, VF32, LINE) for tile in self.tiles]
        if self.format.scales == "f16":
            return self._halves(b, header, 0)
        if self.format.scales == "e8m0":
            exponents = self._bytes(b, header, 0, group, "arith.extui")
            return [((e - 1).max(0) << 23).bitcast(F32) for e in exponents]  # half of it: codes are doubled
        place = _HALVES * (2 if self.format.mins else 1)
        factors = [b.convert("arith.sitofp", v, VF32) for v in self._bytes(b, header, place, group, "arith.extsi")]
        return [d * factor for d, factor in zip(self._halves(b, header, 0), factors, strict=True)]

    def mins(self, b: Builder, header: Value, group: Value) -> list[Value]:
        """Load the minima of a group's tiles."""
        halves = self._halves(b, header, _HALVES)
        if self.format.scales == "f16":
            return halves
        place = 2 * _HALVES + self.format.super_groups * BLOCK
        factors = [b.convert("arith.sitofp", v, VF32) for v in self._bytes(b, header, place, group, "arith.extui")]
        return [d * factor for d, factor in zip(halves, factors, strict=True)]

    def _halves(self, b: Builder, header: Value, at: int) -> list[Value]:
        halves = [b.load(header, tile * (LINE // 2) + at, vector(F16), LINE // 2) for tile in self.tiles]
        return [b.convert("arith.extf", half, VF32) for half in halves]

    def _bytes(self, b: Builder, header: Value, at: int, group: Value, extension: str) -> list[Value]:
        """Load the bytes of a group in a table at `at`, [groups of the header][32 columns]."""
        place = group % self.format.super_groups * BLOCK + at
        halves = [b.load(header, place + tile * TILE_ROWS, vector(I8), TILE_ROWS) for tile in self.tiles]
        return [b.convert(extension, half, VI32) for half in halves]


@dataclass(frozen=True)
class DotOperands(QuantizedOperands):
    """Operands of dot products on one instruction set."""

    isa: str

    @property
    def is_direct(self) -> bool:
        """True if each line has whole values, which are not codes."""
        return self.format.bits in (4, 8) and not self.format.codebook and self.shared == 1

    @property
    def narrow_steps(self) -> int:
        """Sums of two products of bytes that add up in 16 bits without overflow: 0 to the number in a unit."""
        return min(QUADS, 32767 // (2 * self.format.largest * 127))

    @property
    def offset(self) -> int:
        """Number that is subtracted from weights, and from their zero points: NEON takes them as signed bytes."""
        return 128 if is_neon(self.isa) and self.format.largest > 127 else 0

    @property
    def middle(self) -> int:
        """The zero point of formats that have one for all weights."""
        return self.format.middle - self.offset

    def zeros(self, b: Builder, header: Value) -> list[Value]:
        """Load the zero points of a group's tiles."""
        at = self.format.header_bytes - LINE
        halves = [b.load(header, tile * (LINE // 2) + at, vector(I16), LINE // 2) for tile in self.tiles]
        zeros = [b.convert("arith.extsi", half, VI32) for half in halves]
        return [zero - self.offset for zero in zeros] if self.offset else zeros

    def start(self, b: Builder, header: Value, total: Value) -> list[Value]:
        """Return -zero * sum x for the tiles of a row."""
        if not self.format.zeros:
            return [total * -self.middle if self.middle else b.constant(0, VI32)] * len(self.tiles)
        return [zero * total * -1 for zero in self.zeros(b, header)]

    def add_scaled(
        self, b: Builder, header: Value, group: Value, sums: Sequence[Value], scale: Value, x_sum: Value,
        totals: Sequence[Value],
    ) -> list[Value]:  # fmt: skip
        """Return `totals` plus a row's scaled sums of a group, and its minima, for its tiles."""
        factor = b.broadcast(scale)
        results = [
            b.fma(b.convert("arith.sitofp", value, VF32), weight_scale * factor, total)
            for value, weight_scale, total in zip(sums, self.scales(b, header, group), totals, strict=True)
        ]
        if not self.format.mins:
            return results
        subtracted = b.broadcast(scale * b.convert("arith.sitofp", x_sum, F32) * -1.0)
        return [b.fma(least, subtracted, r) for least, r in zip(self.mins(b, header, group), results, strict=True)]

    def quads(self, b: Builder, unit: Value, tile: Value | int, first: int, count: int) -> list[Value]:
        """Load `count` fours of k of a tile, from number `first` on of the unit at `unit`: lanes of bytes."""
        values: list[Value] = [b.constant(0, VI32)] * count
        line, shift = 0, 0
        for plane in self.format.planes:
            each = 8 // plane  # quads in a line
            lines = {
                number: b.load(unit, tile * LINE + (line + number) * (2 * LINE), VI32, LINE)
                for number in range(first // each, -(-(first + count) // each))
            }
            for i in range(count):
                quad = first + i
                value = _field(lines[quad // each], quad % each * plane, plane, shift)
                values[i] = value if shift == 0 else values[i] | value
            line, shift = line + plane, shift + plane
        return [self._decoded(b, value) for value in values]

    def _decoded(self, b: Builder, codes: Value) -> Value:
        """Return the values of codes, if there is a codebook, as bytes that the instruction set multiplies."""
        if not self.format.codebook:
            return self.offset_bytes(codes)
        return look_up(b, self.isa, tuple((value - self.offset) % 256 for value in self.format.codebook), codes)

    def offset_bytes(self, values: Value) -> Value:
        """Return bytes less the offset, in lanes of 32 bits."""
        return values ^ -0x7F7F7F80 if self.offset else values  # 0x80 in each byte


def _field(line: Value, at: int, bits: int, shift: int) -> Value:
    """Return `bits` bits of each byte, from bit `at` on, moved to bit `shift`."""
    if bits == 8:
        return line
    moved = line >> (at - shift) if at > shift else line << (shift - at) if shift > at else line
    return moved & (((1 << bits) - 1 << shift) * 0x01010101)
