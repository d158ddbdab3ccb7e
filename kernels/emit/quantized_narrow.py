"""Quantized products of several rows for AVX2 and NEON, whose registers (16 of 8 lanes, 32 of 4) hold the sums of up to
six rows and 16 columns.

A line of weights is one step or two: what one instruction of AVX2 multiplies by 32 bits of x. AVX-VNNI, NEON and values
of few bits take four k a step. On AVX2 without VNNI, `vpmaddubsw` adds their products by pairs, those of int4 at most
2 x 15 x 127 = 3,810, so that eight steps add up in 16 bits before `vpmaddwd` widens them; of larger values fewer do.
Pairs of products of int8 may exceed 16 bits, so there int8 takes two k a step, both operands widened to 16 bits, by
`vpmaddwd`. Values that are stored in several planes, or as codes, are always unpacked into steps first.

Columns are taken in parts of at most 128 k, which stay in the first-level cache while all rows use them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from quire.kernels.emit.builder import I8, I16, I32, Builder, Value, vector
from quire.kernels.emit.dots import add_dots, has_dots
from quire.kernels.emit.layout import BLOCK, TILE_ROWS
from quire.kernels.emit.products import FAR_BYTES, NEAR_BYTES, RowSink
from quire.kernels.emit.quantized_accumulators import INTS, LANES, REGISTER, VECTORS, Accumulators
from quire.kernels.emit.quantized_operands import LINE, DotOperands

SHARING_ROWS = 64
"""Rows that use a part of the columns before the next one."""

MAX_PART = 128
"""Most elements of k in a part."""

ROW_CHUNKS, UNPACKED_ROW_CHUNKS = (4, 2, 1), (6, 4, 2, 1)
"""Numbers of rows computed at once, then smaller chunks for the remainder. Unpacking a line takes registers too."""

MIN_UNPACKED_ROWS = 9
"""Fewest rows for which weights in 16 bits are stored for all rows, not made anew for each chunk."""

AHEAD_BYTES = 2048
"""Prefetch distance of lines that are multiplied as they are read. A second one into another level costs up to a third
of the speed of few rows."""

WORDS, BYTES = vector(I16, 2 * LANES), vector(I8, 4 * LANES)


@dataclass(frozen=True)
class _Scratch:
    """Memory of a call. `weights` and `x` are in 16 bits: a part's weights, and a part of 16 rows."""

    weights: Value
    x: Value
    accumulators: Accumulators


@dataclass(frozen=True)
class _Rows:
    """The rows of one pass over the columns: their number, and the address of their panels."""

    count: Value
    panels: Value
    scratch: _Scratch
    unpacked: bool


@dataclass(frozen=True)
class NarrowProducts(DotOperands):
    """Emits products with quantized columns."""

    @property
    def by_dots(self) -> bool:
        """True if a step is an exact dot product of four bytes."""
        return has_dots(self.isa)

    @property
    def part(self) -> int:
        """Elements of k in a part; it divides a group."""
        return math.gcd(self.format.span(self.k), MAX_PART)

    @property
    def parts(self) -> int:
        """Parts of a group."""
        return self.format.span(self.k) // self.part

    @property
    def by_words(self) -> bool:
        """True if a step is two k in 16 bits each, otherwise four k in 8 bits each."""
        return not self.by_dots and self.narrow_steps == 0

    @property
    def narrow(self) -> bool:
        """True if steps add up in 16 bits."""
        return not self.by_dots and not self.by_words

    @property
    def line_steps(self) -> int:
        """Steps of a line; there are two of what has been unpacked."""
        return 1 if self.format.bits == 8 and self.by_dots and self.is_direct else 2

    @property
    def line_depth(self) -> int:
        """Elements of k in a line."""
        return self.line_steps * (2 if self.by_words else 4)

    def emit(self, b: Builder, x: Value, rows: Value, block: Value, sink: RowSink) -> None:
        """Call `sink` with each of `rows` rows of the panels at `x` times a block of 32 columns."""
        words = self.part * 2
        accumulators = Accumulators.reserve(b, self, SHARING_ROWS)
        scratch = _Scratch(b.scratch(BLOCK * words), b.scratch(TILE_ROWS * words), accumulators)
        if not self.by_words or not self.is_direct:
            self._emit(b, x, rows, block, scratch, sink, unpacked=not self.is_direct)
            return
        with b.when(rows < MIN_UNPACKED_ROWS):
            self._emit(b, x, rows, block, scratch, sink, unpacked=False)
        with b.when(rows >= MIN_UNPACKED_ROWS):
            self._emit(b, x, rows, block, scratch, sink, unpacked=True)

    def _emit(
        self, b: Builder, x: Value, rows: Value, block: Value, scratch: _Scratch, sink: RowSink, unpacked: bool
    ) -> None:
        with b.loop(0, rows, SHARING_ROWS) as first:
            some = _Rows((rows - first.index).min(SHARING_ROWS), self.panel(b, x, first.index), scratch, unpacked)
            scratch.accumulators.clear_results(b, some.count)
            with b.loop(0, self.format.groups(self.k) // self.shared) as group:
                for part in range(self.shared):
                    self._group(b, some, group.index, part, block)
            with b.loop(0, some.count) as row:
                sink(first.index + row.index, scratch.accumulators.result(b, row.index))

    def _group(self, b: Builder, rows: _Rows, x_group: Value, half: int, block: Value) -> None:
        """Add the scaled sums of a group to the results: number `half` of those that share a group of activations."""
        accumulators, group = rows.scratch.accumulators, x_group * self.shared + half
        accumulators.open_group(b, self.header(b, block, group), group)
        if self.parts > 1:
            accumulators.clear_sums(b, rows.count)
        with b.loop(0, self.parts) as part:
            offset = part.index * (self.part * self.format.bits // 16 * LINE)
            lines = b.address(self.lines(b, block, group), offset)
            if rows.unpacked:
                self._unpack(b, lines, rows.scratch.weights, half)
            k = group * self.format.span(self.k) + part.index * self.part
            weights = rows.scratch.weights if rows.unpacked else lines
            with b.loop(0, rows.count, TILE_ROWS) as first:
                self._panel_part(b, rows, first.index, x_group, half, k, weights)
        if self.parts > 1:
            with b.loop(0, rows.count) as row:
                x_scales = self.panel_scales(b, self.panel(b, rows.panels, row.index), x_group)
                x_scales = b.address(x_scales, row.index % TILE_ROWS * 4)
                accumulators.add_scaled_sums(b, x_scales, half, row.index)

    def _panel_part(
        self, b: Builder, rows: _Rows, first: Value, x_group: Value, half: int, k: Value, weights: Value
    ) -> None:
        """Add the products of a part, which starts with `k`, and the panel of rows that starts with `first`."""
        accumulators = rows.scratch.accumulators
        panel, count = self.panel(b, rows.panels, first), (rows.count - first).min(TILE_ROWS)
        x, row_bytes = b.address(panel, k // LINE * (TILE_ROWS * LINE) + k % LINE), LINE
        if self.by_words:
            self._widen(b, x, count, rows.scratch.x)
            x, row_bytes = rows.scratch.x, self.part * 2
        x_scales, done = self.panel_scales(b, panel, x_group), b.index(0)
        for chunk in UNPACKED_ROW_CHUNKS if rows.unpacked else ROW_CHUNKS:
            stop = done + (count - done) // chunk * chunk
            with b.loop(done, stop, chunk) as row:
                values, number = b.address(x, row.index * row_bytes), first + row.index
                for tile in range(2):
                    at = b.address(weights, tile * LINE)
                    sums = self._sums(b, at, values, row_bytes, chunk, rows.unpacked)
                    if self.parts > 1:
                        accumulators.add(b, number, tile, sums)
                    else:
                        accumulators.add_scaled(b, b.address(x_scales, row.index * 4), half, number, tile, sums)
            done = stop

    # Operands

    def _unpack(self, b: Builder, lines: Value, target: Value, half: int) -> None:
        """Store the steps of a part, [step][32 columns]; those of a group of 16 are half number `half` of a unit."""
        count, step_bytes = min(self.part, BLOCK) // 4, 2 * LINE
        with b.loop(0, max(self.part // BLOCK, 1)) as unit:
            source = b.address(lines, unit.index * (self.format.bits * 2 * LINE))
            steps = b.address(target, unit.index * (count * (2 if self.by_words else 1) * step_bytes))
            for at in range(0, self.format.bits * 2 * LINE, LINE):
                b.prefetch(source, at + NEAR_BYTES, level=1)
                b.prefetch(source, at + FAR_BYTES, level=2)
            for tile in range(2):
                quads = self.quads(b, source, tile, half * count if self.shared > 1 else 0, count)
                for i, quad in enumerate(quads):
                    for at in range(VECTORS):
                        for j, step in enumerate(self._steps_of_quad(b, b.half(quad, at))):
                            number = i * 2 + j if self.by_words else i
                            b.store(step, steps, number * step_bytes + tile * LINE + at * REGISTER, REGISTER)

    def _steps_of_quad(self, b: Builder, quad: Value) -> list[Value]:
        """Return the steps of a register of four k."""
        if not self.by_words:
            return [quad]
        values, zero = b.lanes_as(quad, I8), b.constant(0, BYTES)
        orders = [[at + i for at in range(0, REGISTER, 4) for i in (k, REGISTER, k + 1, REGISTER)] for k in (0, 2)]
        return [b.lanes_as(b.shuffle(values, zero, order), I32) for order in orders]

    def _steps_of(self, b: Builder, line: Value) -> list[Value]:
        """Return the steps of a register of a line."""
        if self.format.bits == 4:
            return [line & 0x0F0F0F0F, (line >> 4) & 0x0F0F0F0F]
        return self._steps_of_quad(b, self.offset_bytes(line))

    def _line(self, b: Builder, weights: Value, line: Value, unpacked: bool) -> list[list[Value]]:
        """Return the steps of a line, each as the registers of a tile."""
        if unpacked:
            at = b.address(weights, line * (4 * LINE))
            return [[b.load(at, i + v * REGISTER, INTS, REGISTER) for v in range(VECTORS)] for i in (0, 2 * LINE)]
        at = b.address(weights, line * (2 * LINE))
        b.prefetch(at, AHEAD_BYTES, level=1)
        registers = [self._steps_of(b, b.load(at, v * REGISTER, INTS, REGISTER)) for v in range(VECTORS)]
        return [list(step) for step in zip(*registers, strict=True)]

    def _widen(self, b: Builder, x: Value, rows: Value, target: Value) -> None:
        """Store rows of x in 16 bits, [row][part]."""
        with b.loop(0, rows) as row:
            source, words = b.address(x, row.index * LINE), b.address(target, row.index * (self.part * 2))
            for k in range(0, self.part, 2 * LANES):
                value = b.load(source, k // LINE * (TILE_ROWS * LINE) + k % LINE, vector(I8, 2 * LANES), 2 * LANES)
                b.store(b.convert("arith.extsi", value, WORDS), words, k * 2, REGISTER)

    # Sums

    def _sums(self, b: Builder, weights: Value, x: Value, row_bytes: int, chunk: int, unpacked: bool) -> list[Value]:
        """Return a part's sums of products of `chunk` rows with a tile, the registers of each row together."""
        size, count = min(BLOCK, self.part), chunk * VECTORS
        lines = size // self.line_depth
        together = self.narrow_steps // self.line_steps if self.narrow else lines
        with b.loop(0, self.part // size, state=[b.constant(0, INTS)] * count) as block:
            base = b.address(weights, block.index * (lines * (4 if unpacked else 2) * LINE))
            offset = block.index // 2 * (TILE_ROWS * LINE) + block.index % 2 * BLOCK  # in a panel
            values = b.address(x, block.index * (BLOCK * 2) if self.by_words else offset)
            totals = list(block.state)
            for first in range(0, lines, together):
                start = [b.constant(0, WORDS)] * count if self.narrow else totals
                with b.loop(first, min(first + together, lines), state=start) as line:
                    state = list(line.state)
                    for step, columns in enumerate(self._line(b, base, line.index, unpacked)):
                        at = b.address(values, line.index * (self.line_steps * 4) + step * 4)
                        for r in range(chunk):
                            bits = b.broadcast(b.load(at, r * row_bytes, I32), LANES)
                            for v, w in enumerate(columns):
                                state[r * VECTORS + v] = self._multiply_add(b, state[r * VECTORS + v], w, bits)
                    line.carry(*state)
                totals = self._widened(b, totals, line.results) if self.narrow else line.results
            block.carry(*totals)
        return block.results

    def _multiply_add(self, b: Builder, acc: Value, weights: Value, x: Value) -> Value:
        """Add the products of a step to `acc`, in 16 bits if they are narrow."""
        if self.by_words:
            return b.opaque(acc + self._add_pairs(b, b.lanes_as(weights, I16), b.lanes_as(x, I16)))
        if self.by_dots:
            return add_dots(b, self.isa, acc, weights, x)
        operands = [b.lanes_as(weights, I8), b.lanes_as(x, I8)]
        return b.opaque(acc + b.call("llvm.x86.avx2.pmadd.ub.sw", operands, WORDS))

    def _add_pairs(self, b: Builder, words: Value, factors: Value) -> Value:
        return b.call("llvm.x86.avx2.pmadd.wd", [words, factors], INTS)

    def _widened(self, b: Builder, sums: Sequence[Value], narrow: Sequence[Value]) -> list[Value]:
        """Return `sums` plus the pairs of `narrow` sums."""
        ones = b.constant(1, WORDS)
        return [total + self._add_pairs(b, words, ones) for total, words in zip(sums, narrow, strict=True)]
