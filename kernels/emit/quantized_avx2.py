"""Quantized products of several rows for AVX2, whose 16 registers hold 8 lanes each.

Up to 64 rows share the unpacking of weights. A block of 32 columns is taken in parts of at most 128 k, each unpacked
into the first-level cache as steps: what one instruction multiplies by 32 bits of x. The sums of up to six rows and 16
columns stay in registers.

AVX-VNNI and int4 take four k a step. Without VNNI, `vpmaddubsw` adds products by pairs, at most 2 x 15 x 127 = 3,810,
so that eight steps add up in 16 bits before `vpmaddwd` widens them. Pairs of int8 products may exceed 16 bits, so int8
takes two k a step, in 16 bits each, by `vpmaddwd`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from quire.kernels.emit.builder import F32, I8, I16, I32, VF32, VI32, Builder, Value, vector
from quire.kernels.emit.layout import BLOCK, TILE_ROWS
from quire.kernels.emit.products import FAR_BYTES, NEAR_BYTES, RowSink
from quire.kernels.emit.quantized_operands import LINE, QuantizedOperands

SHARING_ROWS = 64
"""Rows that share unpacked weights."""

ROW_CHUNKS = (6, 4, 2, 1)
DIRECT_CHUNKS=(4,2,1)
MIN_UNPACKED_ROWS=5
"""Numbers of rows computed at once, then smaller chunks for the remainder."""

MAX_PART = 128
"""Most elements of k unpacked at a time: their steps and x must stay in the first-level cache."""

LANES, REGISTER_BYTES = 8, 32
VECTORS = 2
"""Registers of a tile's 16 columns."""
FLOATS, INTS, WORDS, BYTES = vector(F32, LANES), vector(I32, LANES), vector(I16, 2 * LANES), vector(I8, 4 * LANES)


@dataclass(frozen=True)
class _Memory:
    """Scratch memory: steps of weights and x in 16 bits of a part; int32 sums of a group and results, both
    [row][32 columns]; scales and zero points of a group."""

    steps: Value
    x: Value
    sums: Value
    results: Value
    scales: Value
    zeros: Value


@dataclass(frozen=True)
class Avx2Products(QuantizedOperands):
    """Emits products with quantized columns, by AVX-VNNI if `vnni`."""

    vnni: bool

    @property
    def part(self) -> int:
        """Elements of k unpacked at a time."""
        return math.gcd(self.format.span(self.k), MAX_PART)

    @property
    def parts(self) -> int:
        """Parts of a group."""
        return self.format.span(self.k) // self.part

    @property
    def by_words(self) -> bool:
        """True if a step is two k in 16 bits each, otherwise four k in 8 bits each."""
        return self.format.bits == 8 and not self.vnni

    @property
    def line_steps(self) -> int:
        """Steps of a line."""
        return 1 if self.format.bits == 8 and self.vnni else 2

    def emit(self, b: Builder, x: Value, rows: Value, block: Value, sink: RowSink) -> None:
        """Call `sink` with each of `rows` rows of the panels at `x` times a block of 32 columns."""
        tables = SHARING_ROWS * 2 * LINE
        sizes = (self.part * 2 * BLOCK, TILE_ROWS * self.part * 2, tables, tables, 128, 128)
        memory = _Memory(*(b.scratch(size) for size in sizes))
        with b.when(rows < MIN_UNPACKED_ROWS):
            self._emit(b, memory, x, rows, block, sink, unpacked=False)
        with b.when(rows >= MIN_UNPACKED_ROWS):
            self._emit(b, memory, x, rows, block, sink, unpacked=True)

    def _emit(self, b, memory, x: Value, rows: Value, block: Value, sink: RowSink, unpacked: bool) -> None:
        with b.loop(0, rows, SHARING_ROWS) as first:
            count = (rows - first.index).min(SHARING_ROWS)
            panels = self.panel(b, x, first.index)
            self._clear(b, memory.results, count)
            with b.loop(0, self.format.groups(self.k)) as group:
                self._group(b, memory, panels, count, group.index, self.header(b, block, group.index), unpacked)
            with b.loop(0, count) as row:
                values = [self._cell(b, memory.results, row.index, tile) for tile in range(2)]
                sink(first.index + row.index, [b.load(at, 0, VF32, LINE) for at in values])

    @staticmethod
    def _cell(b: Builder, table: Value, row: Value, tile: int) -> Value:
        return b.address(table, row * (2 * LINE) + tile * LINE)

    def _clear(self, b: Builder, table: Value, count: Value) -> None:
        with b.loop(0, count) as row:
            for tile in range(2):
                b.store(b.constant(0, VI32), self._cell(b, table, row.index, tile), 0, LINE)

    def _group(self, b: Builder, memory: _Memory, panels: Value, count: Value, group: Value, header: Value, unpacked: bool) -> None:
        """Add the scaled sums of a group to the results."""
        for tile, scales in enumerate(self.scales(b, header)):
            b.store(scales, memory.scales, tile * LINE, LINE)
        for tile, zeros in enumerate(self.zeros(b, header) if self.format.zeros else []):
            b.store(zeros, memory.zeros, tile * LINE, LINE)
        if self.parts > 1:
            self._clear(b, memory.sums, count)
        with b.loop(0, self.parts) as part:
            lines = b.address(header, part.index * (self.part // self.format.line_depth * 2 * LINE))
            weights = b.address(lines, self.format.header_bytes)
            if unpacked:
                self._unpack(b, weights, memory.steps)
                weights = memory.steps
            k = group * self.format.span(self.k) + part.index * self.part
            with b.loop(0, count, TILE_ROWS) as first:
                self._panel_part(b, memory, self.panel(b, panels, first.index), first.index, count, group, k, weights, unpacked)
        if self.parts > 1:
            with b.loop(0, count) as row:
                scales = self.panel_scales(b, self.panel(b, panels, row.index), group)
                for tile in range(2):
                    at = self._cell(b, memory.sums, row.index, tile)
                    sums = [b.load(at, v * REGISTER_BYTES, INTS, REGISTER_BYTES) for v in range(VECTORS)]
                    self._scale(b, memory, b.address(scales, row.index % TILE_ROWS * 4), row.index, tile, sums)

    def _unpack(self, b: Builder, lines: Value, target: Value) -> None:
        """Store a part's steps, [step][32 columns][4 bytes]."""
        with b.loop(0, self.part // self.format.line_depth) as line:
            source, steps = b.address(lines, line.index * (2 * LINE)), b.address(target, line.index * (4 * LINE))
            for at in range(0, 2 * LINE, REGISTER_BYTES):
                if at % LINE == 0:
                    b.prefetch(source, at + NEAR_BYTES, level=1)
                    b.prefetch(source, at + FAR_BYTES, level=2)
                value = b.load(source, at, INTS, REGISTER_BYTES)
                for i, step in enumerate(self._steps_of(b, value)):
                    b.store(step, steps, i * (2 * LINE) + at, REGISTER_BYTES)

    def _steps_of(self, b: Builder, line: Value) -> list[Value]:
        """Return the steps of a register of a line."""
        if self.line_steps == 1:
            return [line]
        if self.format.bits == 4:
            return [line & 0x0F0F0F0F, (line >> 4) & 0x0F0F0F0F]
        bytes_, zero = b.lanes_as(line, I8), b.constant(0, BYTES)
        pairs = [[at + i for at in range(0, 4 * LANES, 4) for i in (k, 4 * LANES, k + 1, 4 * LANES)] for k in (0, 2)]
        return [b.lanes_as(b.shuffle(bytes_, zero, order), I32) for order in pairs]

    def _panel_part(
        self, b: Builder, memory: _Memory, panel: Value, first: Value, count: Value, group: Value, k: Value,
        weights: Value, unpacked: bool,
    ) -> None:  # fmt: skip
        """Add a part's products of the panel of rows from `first` on."""
        rows = (count - first).min(TILE_ROWS)
        x, row_bytes = b.address(panel, k // LINE * (TILE_ROWS * LINE) + k % LINE), LINE
        if self.by_words:
            self._widen(b, x, rows, memory.x)
            x, row_bytes = memory.x, self.part * 2
        scales = self.panel_scales(b, panel, group)
        done = b.index(0)
        for chunk in ROW_CHUNKS if unpacked else DIRECT_CHUNKS:
            stop = done + (rows - done) // chunk * chunk
            with b.loop(done, stop, chunk) as row:
                values = b.address(x, row.index * row_bytes)
                for tile in range(2):
                    sums = self._sums(b, b.address(weights, tile * LINE), values, row_bytes, chunk, unpacked)
                    if self.parts > 1:
                        self._add(b, memory.sums, first + row.index, tile, sums)
                    else:
                        self._scale(b, memory, b.address(scales, row.index * 4), first + row.index, tile, sums)
            done = stop

    def _widen(self, b: Builder, x: Value, rows: Value, target: Value) -> None:
        """Convert a panel's x to 16 bits, [16 rows][part]."""
        with b.loop(0, rows) as row:
            source, words = b.address(x, row.index * LINE), b.address(target, row.index * (self.part * 2))
            for k in range(0, self.part, 2 * LANES):
                value = b.load(source, k // LINE * (TILE_ROWS * LINE) + k % LINE, vector(I8, 2 * LANES), 2 * LANES)
                b.store(b.convert("arith.extsi", value, WORDS), words, k * 2, REGISTER_BYTES)

    def _sums(self, b: Builder, weights: Value, x: Value, row_bytes: int, chunk: int, unpacked: bool) -> list[Value]:
        """Return a part's sums of products of `chunk` rows with a tile, the registers of each row together."""
        count, narrow = chunk * VECTORS, self.format.bits == 4 and not self.vnni
        with b.loop(0, self.part // BLOCK, state=[b.constant(0, INTS)] * count) as block:
            lines = BLOCK // self.format.line_depth
            steps = b.address(weights, block.index * (lines * 2 * LINE * (self.line_steps if unpacked else 1)))
            if self.by_words:
                values = b.address(x, block.index * (BLOCK * 2))
            else:
                values = b.address(x, block.index // 2 * (TILE_ROWS * LINE) + block.index % 2 * BLOCK)
            start = [b.constant(0, WORDS)] * count if narrow else block.state
            with b.loop(0, lines, state=start) as line:
                state = list(line.state)
                for offset, w in enumerate(self._line(b, steps, line.index, unpacked)):
                    at = b.address(values, (line.index * self.line_steps + offset) * 4)
                    for r in range(chunk):
                        bits = b.broadcast(b.load(at, r * row_bytes, I32), LANES)
                        for v in range(VECTORS):
                            i = r * VECTORS + v
                            state[i] = self._multiply_add(b, state[i], w[v], bits)
                line.carry(*state)
            sums = line.results
            if narrow:
                ones = b.constant(1, WORDS)
                sums = [total + self._words(b, s, ones) for total, s in zip(block.state, sums, strict=True)]
            block.carry(*sums)
        return block.results

    def _line(self, b, weights, line, unpacked):
        """Return the steps of a line, each the registers of a tile."""
        if unpacked:
            at = b.address(weights, line * (self.line_steps * 2 * LINE))
            return [[b.load(at, i * 2 * LINE + v * REGISTER_BYTES, INTS, REGISTER_BYTES) for v in range(VECTORS)] for i in range(self.line_steps)]
        at = b.address(weights, line * (2 * LINE))
        b.prefetch(at, NEAR_BYTES, level=1)
        registers = [self._steps_of(b, b.load(at, v * REGISTER_BYTES, INTS, REGISTER_BYTES)) for v in range(VECTORS)]
        return [list(step) for step in zip(*registers, strict=True)]

    def _multiply_add(self, b: Builder, acc: Value, weights: Value, x: Value) -> Value:
        """Add the products of a step."""
        if self.by_words:
            return b.opaque(acc + self._words(b, b.lanes_as(weights, I16), b.lanes_as(x, I16)))
        operands = [b.lanes_as(weights, I8), b.lanes_as(x, I8)]
        if self.vnni:
            return b.call("llvm.x86.avx512.vpdpbusd.256", [acc, *operands], INTS)
        return b.opaque(acc + b.call("llvm.x86.avx2.pmadd.ub.sw", operands, WORDS))

    def _words(self, b: Builder, left: Value, right: Value) -> Value:
        return b.call("llvm.x86.avx2.pmadd.wd", [left, right], INTS)

    def _add(self, b: Builder, table: Value, row: Value, tile: int, sums: Sequence[Value]) -> None:
        """Add a part's sums to those of its group."""
        base = self._cell(b, table, row, tile)
        for i, value in enumerate(sums):
            at = i // VECTORS * (2 * LINE) + i % VECTORS * REGISTER_BYTES
            b.store(b.load(base, at, INTS, REGISTER_BYTES) + value, base, at, REGISTER_BYTES)

    def _scale(
        self, b: Builder, memory: _Memory, x_scales: Value, row: Value, tile: int, sums: Sequence[Value]
    ) -> None:
        """Add a group's scaled sums, those of consecutive rows from `row` on, to the results."""
        base = self._cell(b, memory.results, row, tile)
        for i, value in enumerate(sums):
            r, v = i // VECTORS, i % VECTORS
            x_sum = b.broadcast(b.load(x_scales, TILE_ROWS * 4 + r * 4, I32), LANES)
            zero: Value | int = self.format.middle
            if self.format.zeros:
                zero = b.load(memory.zeros, tile * LINE + v * REGISTER_BYTES, INTS, REGISTER_BYTES)
            total = b.convert("arith.sitofp", value - x_sum * zero, FLOATS)
            scale = b.load(memory.scales, tile * LINE + v * REGISTER_BYTES, FLOATS, REGISTER_BYTES)
            at = r * (2 * LINE) + v * REGISTER_BYTES
            result = b.load(base, at, FLOATS, REGISTER_BYTES)
            factor = scale * b.broadcast(b.load(x_scales, r * 4, F32), LANES)
            b.store(b.fma(total, factor, result), base, at, REGISTER_BYTES)
