"""Products of quantized operands: int8 rows times packed int8 or int4 columns, exact in int32, scaled to f32.

Per output and group g of k: `I = sum x (w - zero)` in int32, then `acc = fma(f32(I), sw[g, n] * sx[m, g], acc)`, g
ascending, acc from 0. `I` is exact in any order, so every instruction set gives the same bits.

Values of w are unsigned and values of x signed, as VNNI requires. The zero point contributes a start value of
`-zero * sum x`, whose sum is computed when x is quantized.

The 16 registers of AVX2 need another order of loops for several rows, which is in quantized_avx2.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quire.kernels.emit.builder import F32, I8, I16, I32, I64, TILE, VF32, VI32, Builder, Value
from quire.kernels.emit.layout import TILE_ROWS
from quire.kernels.emit.products import NEAR_BYTES, RowSink
from quire.kernels.emit.quantized_avx2 import Avx2Products
from quire.kernels.emit.quantized_operands import LINE, QuantizedOperands

LINES_PER_ITERATION = 2
"""Lines of each tile in one iteration of the innermost loop."""

ROW_CHUNKS = (4, 2, 1)
"""Numbers of rows computed at once, then smaller chunks for the remainder. Eight rows with groups of 32 would spill
their sums at the end of each group and be a quarter slower."""

MIN_TILE_ROWS = 5
"""Fewest rows for which AMX tiles, which always compute 16, are faster than VNNI."""


@dataclass(frozen=True)
class QuantizedProducts(QuantizedOperands):
    """Emits products with quantized columns, for one instruction set."""

    isa: str

    def emit(self, b: Builder, x: Value, rows: Value, block: Value, sink: RowSink) -> None:
        """Call `sink` with each of `rows` rows of the panels at `x` times a block of 32 columns."""
        if self.isa == "amx":
            few, emit_many = MIN_TILE_ROWS, self._emit_tiles
        elif self.isa.startswith("avx2"):
            few, emit_many = 2, Avx2Products(self.format, self.k, self.isa == "avx2-vnni").emit
        else:
            self._emit_chunks(b, x, rows, block, sink, ROW_CHUNKS)
            return
        with b.when(rows < few):
            self._emit_chunks(b, x, rows, block, sink, [chunk for chunk in ROW_CHUNKS if chunk < few])
        with b.when(rows >= few):
            emit_many(b, x, rows, block, sink)

    # Rows times lines

    def _emit_chunks(
        self, b: Builder, x: Value, rows: Value, block: Value, sink: RowSink, chunks: Sequence[int]
    ) -> None:
        with b.loop(0, rows, TILE_ROWS) as first:
            panel = self.panel(b, x, first.index)

            def in_panel(row: Value, values: Sequence[Value]) -> None:
                sink(first.index + row, values)

            done, count = b.index(0), (rows - first.index).min(TILE_ROWS)
            for chunk in chunks:
                stop = done + (count - done) // chunk * chunk
                with b.loop(done, stop, chunk) as row:
                    self._chunk(b, panel, row.index, chunk, block, in_panel)
                done = stop

    def _chunk(self, b: Builder, panel: Value, row: Value, chunk: int, block: Value, sink: RowSink) -> None:
        zero = b.constant(0.0, VF32)
        with b.loop(0, self.format.groups(self.k), state=[zero] * (2 * chunk)) as group:
            header = self.header(b, block, group.index)
            scales = b.address(self.panel_scales(b, panel, group.index), row * 4)
            start = []
            for r in range(chunk):
                total = b.load(scales, TILE_ROWS * 4 + r * 4, I32)
                start += self._start(b, header, b.broadcast(total))
            sums = self._sums(b, panel, row, chunk, group.index, b.address(header, self.format.header_bytes), start)
            factors = self.scales(b, header)
            state = []
            for i, (total, acc) in enumerate(zip(sums, group.state, strict=True)):
                scale = b.broadcast(b.load(scales, i // 2 * 4, F32))
                state.append(b.fma(b.convert("arith.sitofp", total, VF32), factors[i % 2] * scale, acc))
            group.carry(*state)
        for r in range(chunk):
            sink(row + r, group.results[2 * r : 2 * r + 2])

    def _start(self, b: Builder, header: Value, total: Value) -> list[Value]:
        """Return -zero * sum x for the two tiles of a row."""
        if not self.format.zeros:
            return [total * -self.format.middle] * 2
        return [zero * total * -1 for zero in self.zeros(b, header)]

    def _sums(
        self, b: Builder, panel: Value, row: Value, chunk: int, group: Value, lines: Value, start: Sequence[Value]
    ) -> list[Value]:
        """Return `start` plus the group's products, for each row and each of its two tiles."""
        span, depth = self.format.span(self.k), self.format.line_depth
        step = min(span, LINE)  # elements of k that lie together in a panel
        with b.loop(0, span // step, state=start) as part:
            k = group * span + part.index * step
            x = b.address(panel, k // LINE * (TILE_ROWS * LINE) + k % LINE + row * LINE)
            at = b.address(lines, part.index * (step // depth * 2 * LINE))
            with b.loop(0, step // depth, LINES_PER_ITERATION, state=part.state) as lines_:
                state = list(lines_.state)
                for i in range(LINES_PER_ITERATION):
                    line = lines_.index + i
                    weights = [self._load(b, at, line, column) for column in range(2)]
                    values = b.address(x, line * depth)
                    for r in range(chunk):
                        for part_of_line in range(depth // 4):
                            quad = b.broadcast(b.load(values, r * LINE + part_of_line * 4, I32))
                            for column in range(2):
                                acc = 2 * r + column
                                state[acc] = self._dot(b, state[acc], weights[column][part_of_line], quad)
                lines_.carry(*state)
            part.carry(*lines_.results)
        return part.results

    def _load(self, b: Builder, lines: Value, line: Value, column: int) -> list[Value]:
        """Load one line as lanes of four unsigned bytes; int4 gives its low and its high halves."""
        offset = line * (2 * LINE) + column * LINE
        b.prefetch(lines, offset + NEAR_BYTES, level=1)  # a second one, FAR_BYTES ahead, costs more than it gains
        value = b.load(lines, offset, VI32, 64)
        return [value] if self.format.bits == 8 else [value & 0x0F0F0F0F, (value >> 4) & 0x0F0F0F0F]

    def _dot(self, b: Builder, acc: Value, weights: Value, quad: Value) -> Value:
        """Add the sum of unsigned `weights` times signed `quad` over four bytes to each lane of `acc`."""
        if self.isa in ("amx", "avx512-bf16", "avx512-vnni"):
            return b.call("llvm.x86.avx512.vpdpbusd.512", [acc, b.lanes_as(weights, I8), b.lanes_as(quad, I8)], VI32)
        if self.isa == "avx512":
            return acc + self._multiply_add(b, weights, quad, "avx512.pmaddubs.w.512", "avx512.pmaddw.d.512")
        halves = []
        for i in range(2):
            total, w, x = (b.half(v, i) for v in (acc, weights, quad))
            if self.isa == "avx2-vnni":
                operands = [total, b.lanes_as(w, I8), b.lanes_as(x, I8)]
                halves.append(b.call("llvm.x86.avx512.vpdpbusd.256", operands, total.type))
            else:
                halves.append(total + self._multiply_add(b, w, x, "avx2.pmadd.ub.sw", "avx2.pmadd.wd"))
        return b.join(*halves)

    def _multiply_add(self, b: Builder, weights: Value, quad: Value, by_bytes: str, by_words: str) -> Value:
        """Emit `_dot` without VNNI. Pairs of int4 products fit 16 bits; pairs of int8 may not, so bytes are widened."""
        words, result = b.lanes_as(weights, I16).type, weights.type
        if self.format.bits == 4:
            pairs = b.call(f"llvm.x86.{by_bytes}", [b.lanes_as(weights, I8), b.lanes_as(quad, I8)], words)
            return b.call(f"llvm.x86.{by_words}", [pairs, b.constant(1, words)], result)
        w, x = b.lanes_as(weights, I16), b.lanes_as(quad, I16)
        even = b.call(f"llvm.x86.{by_words}", [w & 0xFF, b.shift_right_signed(x << 8, 8)], result)
        return even + b.call(f"llvm.x86.{by_words}", [w >> 8, b.shift_right_signed(x, 8)], result)

    # AMX tiles

    def _emit_tiles(self, b: Builder, x: Value, rows: Value, block: Value, sink: RowSink) -> None:
        """Multiply two panels of 16 rows at a time with AMX tiles, so that each loaded and unpacked tile is used twice;
        then the last panel. Rows past the last are computed but not passed to `sink`."""
        totals, result, unpacked = (b.scratch(2 * TILE_ROWS * 2 * LINE) for _ in range(3))
        pairs = (rows + (TILE_ROWS - 1)) // (2 * TILE_ROWS) * (2 * TILE_ROWS)
        for panels, start, stop in ((2, b.index(0), pairs), (1, pairs, rows)):
            with b.loop(start, stop, panels * TILE_ROWS) as first:
                count = (rows - first.index).min(panels * TILE_ROWS)
                bases = [self.panel(b, x, first.index + TILE_ROWS * i) for i in range(panels)]
                with b.loop(0, panels * TILE_ROWS * 2) as line:
                    b.store(b.constant(0.0, VF32), result, line.index * LINE, 64)
                with b.loop(0, self.format.groups(self.k)) as group:
                    header = self.header(b, block, group.index)
                    lines = b.address(header, self.format.header_bytes)
                    self._tile_sums(b, bases, group.index, lines, totals, unpacked)
                    with b.loop(0, count) as row:
                        self._scale_row(
                            b, self.panel(b, bases[0], row.index), row.index, group.index, header, totals, result
                        )
                with b.loop(0, count) as row:
                    at = b.address(result, row.index * (2 * LINE))
                    sink(first.index + row.index, [b.load(at, column * LINE, VF32, 64) for column in range(2)])

    def _scale_row(
        self, b: Builder, panel: Value, row: Value, group: Value, header: Value, totals: Value, result: Value
    ) -> None:
        """Add a group's scaled sums of one row to its result."""
        scales = b.address(self.panel_scales(b, panel, group), row % TILE_ROWS * 4)
        scale = b.broadcast(b.load(scales, 0, F32))
        start = self._start(b, header, b.broadcast(b.load(scales, TILE_ROWS * 4, I32)))
        for column, factor in enumerate(self.scales(b, header)):
            at = row * (2 * LINE) + column * LINE
            total = b.convert("arith.sitofp", b.load(totals, at, VI32, 64) + start[column], VF32)
            b.store(b.fma(total, factor * scale, b.load(result, at, VF32, 64)), result, at, 64)

    def _tile_sums(
        self, b: Builder, panels: Sequence[Value], group: Value, lines: Value, totals: Value, unpacked: Value
    ) -> None:
        """Store the group's products of the panels, without the start, as i32 [row][32 columns]."""
        span, depth = self.format.span(self.k), self.format.line_depth
        step = min(span, LINE)
        rows, k_bytes, line = b.constant(TILE_ROWS, I16), b.constant(step, I16), b.constant(LINE, I16)
        tile_lines = b.constant(step // 4, I16)
        zeros = [b.call("llvm.x86.tilezero.internal", [rows, line], TILE) for _ in range(2 * len(panels))]
        with b.loop(0, span // step, state=zeros) as part:
            k = group * span + part.index * step
            at = b.address(lines, part.index * (step // depth * 2 * LINE))
            weights = []
            for column in range(2):
                source, stride = self._tile_lines(b, at, column, step, unpacked)
                operands = [tile_lines, line, source, b.constant(stride, I64)]
                weights.append(b.call("llvm.x86.tileloadd64.internal", operands, TILE))
            state = []
            for i, panel in enumerate(panels):
                values = b.address(panel, k // LINE * (TILE_ROWS * LINE) + k % LINE)
                a = b.call("llvm.x86.tileloaddt164.internal", [rows, k_bytes, values, b.constant(LINE, I64)], TILE)
                for column, w in enumerate(weights):
                    operands = [rows, line, k_bytes, part.state[2 * i + column], a, w]
                    state.append(b.call("llvm.x86.tdpbsud.internal", operands, TILE))
            part.carry(*state)
        for i, total in enumerate(part.results):
            at = b.address(totals, i // 2 * (TILE_ROWS * 2 * LINE) + i % 2 * LINE)
            b.call_void("llvm.x86.tilestored64.internal", [rows, line, at, b.constant(2 * LINE, I64), total])

    def _tile_lines(self, b: Builder, lines: Value, column: int, step: int, unpacked: Value) -> tuple[Value, int]:
        """Return the address of one tile's `step` elements of k, and the stride of its lines in bytes."""
        if self.format.bits == 8:
            return b.address(lines, column * LINE), 2 * LINE
        unpacked = b.address(unpacked, column * (TILE_ROWS * LINE))
        with b.loop(0, step // self.format.line_depth) as line:
            for i, value in enumerate(self._load(b, lines, line.index, column)):
                b.store(value, unpacked, line.index * (2 * LINE) + i * LINE, 64)
        return unpacked, LINE
