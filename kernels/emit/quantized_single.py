"""Products of one row with columns of quantized bytes on AVX2, which take as long as reading the columns.

A row is widened to 16 bits first, even k and odd k in a table each. The columns are prefetched a few lines at a time,
between the loads of others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quire.kernels.emit.builder import F32, I16, I32, VF32, Builder, Value, vector
from quire.kernels.emit.layout import TILE_ROWS
from quire.kernels.emit.quantized_operands import LINE, DotOperands

AHEAD_BYTES = 1024
"""Prefetch distance. Groups of 32 read memory at 90 % of the rate of plain loads (Zen 2); at 71 from four times as far,
and at 80 where LLVM may move the prefetches of a group to its end."""

QUADS_AT_ONCE, QUADS_PER_ITERATION = 2, 4
"""Fours of k whose weights are loaded at once, as registers allow; and those of an iteration of the innermost loop."""

_REGISTER = 32
_WORDS, _INTS = vector(I16, 16), vector(I32, 8)


@dataclass(frozen=True)
class SingleRowProducts(DotOperands):
    """Emits products of one row."""

    def emit(self, b: Builder, x: Value, block: Value) -> Sequence[Value]:
        """Return the first row of the panel at `x` times a block of 32 columns, as two tiles of 16."""
        words = self._widened(b, x)
        with b.loop(0, self.format.groups(self.k), state=[b.constant(0.0, VF32)] * 2) as group:
            header, x_scales = self.header(b, block, group.index), self.panel_scales(b, x, group.index)
            self._prefetch(b, header, self.format.header_bytes)
            x_sum, x_scale = self.x_sum(b, x_scales, 0, 0), b.load(x_scales, 0, F32)
            values = b.address(words, group.index * self.format.span(self.k))
            lines = self.lines(b, block, group.index)
            sums = self._sums(b, values, lines, self.start(b, header, b.broadcast(x_sum)))
            group.carry(*self.add_scaled(b, header, group.index, sums, x_scale, x_sum, group.state))
        return group.results

    def _widened(self, b: Builder, panel: Value) -> Value:
        """Return the address of the row's even k, i16, which its odd ones follow."""
        depth = self.format.depth(self.k)
        words = b.scratch(2 * depth)
        with b.loop(0, depth, LINE) as k:
            source, target = b.address(panel, k.index * TILE_ROWS), b.address(words, k.index)
            for at in range(0, LINE, _REGISTER):
                pairs = b.lanes_as(b.load(source, at, _INTS, _REGISTER), I16)
                b.store(b.shift_right_signed(pairs << 8, 8), target, at, _REGISTER)
                b.store(b.shift_right_signed(pairs, 8), target, depth + at, _REGISTER)
        return words

    def _sums(self, b: Builder, values: Value, lines: Value, start: Sequence[Value]) -> list[Value]:
        """Return `start` plus a group's products, for two tiles."""
        depth = self.format.depth(self.k)
        with b.loop(0, self.format.span(self.k) // (4 * QUADS_PER_ITERATION), state=start) as some:
            x = b.address(values, some.index * (4 * QUADS_PER_ITERATION))
            unit = b.address(lines, some.index * (2 * LINE * QUADS_PER_ITERATION))
            sums = list(some.state)
            for first in range(0, QUADS_PER_ITERATION, QUADS_AT_ONCE):
                self._prefetch(b, b.address(unit, first * 2 * LINE), QUADS_AT_ONCE * 2 * LINE)
                tiles = [self.quads(b, unit, tile, first, QUADS_AT_ONCE) for tile in range(2)]
                for i in range(QUADS_AT_ONCE):
                    even, odd = (b.broadcast(b.load(x, (first + i) * 4 + at, I32), 8) for at in (0, depth))
                    sums = [self._dot(b, sums[t], tiles[t][i], even, odd) for t in range(2)]
            some.carry(*sums)
        return some.results

    @staticmethod
    def _prefetch(b: Builder, base: Value, size: int) -> None:
        """Prefetch as many bytes as are read at `base`."""
        for at in range(0, size, LINE):
            b.prefetch(base, at + AHEAD_BYTES, level=1)
        b.keep_order()

    @staticmethod
    def _dot(b: Builder, total: Value, quads: Value, even: Value, odd: Value) -> Value:
        """Add the products of four k of 16 columns to their sums."""
        halves = []
        for i in range(2):
            words = b.lanes_as(b.half(quads, i), I16)
            pairs = zip((words & 0xFF, words >> 8), (even, odd), strict=True)
            parts = [b.call("llvm.x86.avx2.pmadd.wd", [w, b.lanes_as(x, I16)], _INTS) for w, x in pairs]
            halves.append(b.opaque(b.half(total, i) + (parts[0] + parts[1])))
        return b.join(*halves)
