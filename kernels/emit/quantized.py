"""Products of quantized operands: int8 rows times packed int8 or int4 columns, exact in int32, scaled to f32.

Per output and group g of k: `I = sum x (w - zero)` in int32, then `acc = fma(f32(I), sw[g, n] * sx[m, g], acc)`, and
with minima `acc = fma(min[g, n], -(sx[m, g] * f32(sum x)), acc)`; g ascending, acc from 0. `I` is exact in any order,
so every instruction set gives the same bits.

Values of w are unsigned and values of x signed, as VNNI requires; NEON takes w and its zero point less 128. The zero
point contributes a start value of `-zero * sum x`, whose sum is computed when x is quantized.

The registers of AVX2 and NEON need another order of loops for several rows, which is in quantized_narrow.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from quire.kernels.emit.builder import F32, I8, I16, I32, I64, TILE, VF32, VI32, Builder, Value
from quire.kernels.emit.dots import add_dots, has_dots, is_narrow, is_neon
from quire.kernels.emit.layout import BLOCK, TILE_ROWS, round_up
from quire.kernels.emit.products import FAR_BYTES, STREAM_BYTES, ColumnSink, RowSink
from quire.kernels.emit.quantized_narrow import NarrowProducts
from quire.kernels.emit.quantized_operands import LINE, QUADS, DotOperands
from quire.kernels.emit.quantized_single import SingleRowProducts

LINES_AT_ONCE = 2
"""Lines of each tile in one iteration of the innermost loop, where lines have whole values."""

QUADS_AT_ONCE = 4
"""Fours of k of each tile whose weights are loaded before they are multiplied."""

ROWS_AT_ONCE = 4
"""Rows computed at once. Eight with groups of 32 would spill their sums at the end of each group and be a quarter
slower. One or two rows that are left are computed with the four before them, as five or as two times three, since
another pass over the weights takes half as long as the first."""

MIN_TILE_ROWS = 5
"""Fewest rows for which AMX tiles, which always compute 16, are faster than VNNI."""


@dataclass(frozen=True)
class ColumnGroup:
    """A group of weights: number `number` of the block of 32 columns at `block`, number `part` of those that share a
    group of activations.

    A group of 16 is half number `part` of a unit of 32.
    """

    block: Value
    number: Value
    part: int


@dataclass(frozen=True)
class QuantizedProducts(DotOperands):
    """Emits products with quantized columns, for one instruction set."""

    def emit(self, b: Builder, x: Value, rows: Value, block: Value, sink: RowSink) -> None:
        """Call `sink` with each of `rows` rows of the panels at `x` times a block of 32 columns."""
        if self.isa == "amx":
            few, emit_many = MIN_TILE_ROWS, self._emit_tiles
        elif is_narrow(self.isa):
            few, emit_many = 2, NarrowProducts(self.format, self.k, self.isa).emit
        else:
            self._emit_chunks(b, x, rows, block, sink, TILE_ROWS)
            return
        with b.when(rows < few):
            if self.isa == "avx2" and self.is_direct and not self.narrow_steps:
                sink(b.index(0), SingleRowProducts(self.format, self.k, self.isa).emit(b, x, block))
            else:
                self._emit_chunks(b, x, rows, block, sink, few - 1)
        with b.when(rows >= few):
            emit_many(b, x, rows, block, sink)

    def emit_item(
        self, b: Builder, x: Value, rows: Value, block: Value, count: int, columns: Callable[[Value], Value],
        sink: ColumnSink, items: Value,
    ) -> None:  # fmt: skip
        """Multiply rows by block number `block` of `count` blocks of columns, whose addresses are `columns`; each of
        them is another one of `items` work items.

        One item may multiply by the next blocks as well, whose items then do nothing.
        """
        self.emit(b, x, rows, columns(block), sink.of(block))

    # Rows times lines

    def _emit_chunks(self, b: Builder, x: Value, rows: Value, block: Value, sink: RowSink, most: int) -> None:
        """Multiply `rows` rows, in panels of 16 with at most `most` rows."""
        with b.loop(0, rows, TILE_ROWS) as first:
            panel = self.panel(b, x, first.index)
            count = (rows - first.index).min(TILE_ROWS)
            done = b.index(0)
            for chunk, times in _chunks(count):
                if chunk > most:
                    continue
                stop = done + times * chunk
                with b.loop(done, stop, chunk) as row:
                    products = self._chunk(b, panel, row.index, chunk, block)
                    for r, values in enumerate(products):
                        sink(first.index + row.index + r, values)
                done = stop

    def _chunk(self, b: Builder, panel: Value, row: Value, chunk: int, block: Value) -> list[Sequence[Value]]:
        """Return the products of `chunk` rows of a panel, from number `row` on, each two vectors of 16 columns."""
        zero = b.constant(0.0, VF32)
        with b.loop(0, self.format.groups(self.k) // self.shared, state=[zero] * (2 * chunk)) as group:
            x_scales = b.address(self.panel_scales(b, panel, group.index), row * 4)
            state = list(group.state)
            if self.format.scales == "super":
                self._prefetch_share(b, block, group.index)
            for part in range(self.shared):
                columns = ColumnGroup(block, group.index * self.shared + part, part)
                header = self.header(b, block, columns.number)
                if self.format.group and self.format.scales != "super":
                    for line in range(0, self.format.header_bytes, LINE):
                        b.prefetch(header, line + FAR_BYTES, level=1)
                x_sums = [self.x_sum(b, x_scales, r, part) for r in range(chunk)]
                start = [value for x_sum in x_sums for value in self.start(b, header, b.broadcast(x_sum))]
                sums = self._sums(b, panel, row, chunk, columns, start)
                for r in range(chunk):
                    both = slice(2 * r, 2 * r + 2)
                    scale = b.load(x_scales, r * 4, F32)
                    state[both] = self.add_scaled(b, header, columns.number, sums[both], scale, x_sums[r], state[both])
            group.carry(*state)
        return [group.results[2 * r : 2 * r + 2] for r in range(chunk)]

    def _prefetch_share(self, b: Builder, block: Value, x_group: Value) -> None:
        """Prefetch a share of the next header and its values, in the order of memory.

        Reading them goes to and fro between header and values, which the hardware prefetcher does not follow.
        """
        units = self.format.super_groups // self.shared
        size, share = self.format.super_bytes(self.k), round_up(-(-self.format.super_bytes(self.k) // units), LINE)
        later = b.address(block, (x_group // units + 1) * size + x_group % units * share)
        for line in range(0, share, LINE):
            b.prefetch(later, line, level=1)

    def _sums(
        self, b: Builder, panel: Value, row: Value, chunk: int, group: ColumnGroup, start: Sequence[Value]
    ) -> list[Value]:
        """Return `start` plus the group's products with `chunk` rows, for each row and each of its two tiles."""
        lines = self.lines(b, group.block, group.number)
        span = self.format.span(self.k)
        step = min(span, LINE) if self.is_direct else BLOCK  # elements of k that lie together in a panel
        with b.loop(0, max(span // step, 1), state=start) as piece:
            k = group.number // self.shared * self.shared * span + piece.index * step
            x = b.address(panel, k // LINE * (TILE_ROWS * LINE) + k % LINE + row * LINE)
            at = b.address(lines, piece.index * (step * self.format.bits // 16 * LINE))
            if not self.is_direct:
                first = group.part * QUADS // self.shared
                piece.carry(*self._add_quads(b, x, at, chunk, first, QUADS // self.shared, piece.state))
            else:
                quads = LINES_AT_ONCE * 8 // self.format.bits
                with b.loop(0, step // (4 * quads), state=piece.state) as some:
                    values = b.address(x, some.index * (4 * quads))
                    unit = b.address(at, some.index * (LINES_AT_ONCE * 2 * LINE))
                    some.carry(*self._add_quads(b, values, unit, chunk, 0, quads, some.state))
                piece.carry(*some.results)
        return piece.results

    def _add_quads(
        self, b: Builder, x: Value, unit: Value, chunk: int, first: int, count: int, sums: Sequence[Value]
    ) -> list[Value]:
        """Return `sums` plus the products of `count` fours of k, from number `first` on of a unit, with x."""
        sums = list(sums)
        lines = LINES_AT_ONCE if self.is_direct else self.format.bits
        for line in range(lines * 2) if first == 0 else ():
            b.prefetch(unit, line * LINE + self._ahead, level=1)
        at_once = self._quads_at_once(chunk)
        for start in range(first, first + count, at_once):
            some = min(at_once, count)
            tiles = [self.quads(b, unit, tile, start, some) for tile in range(2)]
            for i in range(some):
                for r in range(chunk):
                    quad = b.broadcast(b.load(x, r * LINE + (start + i) * 4, I32))
                    for tile in range(2):
                        sums[2 * r + tile] = self._dot(b, sums[2 * r + tile], tiles[tile][i], quad)
        return sums

    @property
    def _ahead(self) -> int:
        """Prefetch distance of units. With the shorter one, int8 takes 10 % less time, and int4 15 % more (Sapphire
        Rapids)."""
        return STREAM_BYTES if self.isa == "amx" and self.format.bits == 8 else FAR_BYTES

    def _quads_at_once(self, chunk: int) -> int:
        """Return the fours of k whose weights are loaded at once, as registers allow beside the sums of rows."""
        many_sums = chunk * (2 if self.format.group else 1) >= 2 * ROWS_AT_ONCE
        return QUADS_AT_ONCE // 2 if many_sums or is_neon(self.isa) else QUADS_AT_ONCE

    def _dot(self, b: Builder, acc: Value, weights: Value, quad: Value) -> Value:
        """Add the sum of `weights` times signed `quad` over four bytes to each lane of `acc`."""
        if has_dots(self.isa):
            return add_dots(b, self.isa, acc, weights, quad)
        if self.isa == "avx512":
            return acc + self._multiply_add(b, weights, quad, "avx512.pmaddubs.w.512", "avx512.pmaddw.d.512")
        halves = []
        for i in range(2):
            total, w, x = (b.half(v, i) for v in (acc, weights, quad))
            halves.append(total + self._multiply_add(b, w, x, "avx2.pmadd.ub.sw", "avx2.pmadd.wd"))
        return b.join(*halves)

    def _multiply_add(self, b: Builder, weights: Value, quad: Value, by_bytes: str, by_words: str) -> Value:
        """Emit `_dot` without VNNI. Pairs of products that may not fit 16 bits are of widened bytes."""
        words, result = b.lanes_as(weights, I16).type, weights.type
        if self.narrow_steps:
            pairs = b.call(f"llvm.x86.{by_bytes}", [b.lanes_as(weights, I8), b.lanes_as(quad, I8)], words)
            return b.call(f"llvm.x86.{by_words}", [pairs, b.constant(1, words)], result)
        w, x = b.lanes_as(weights, I16), b.lanes_as(quad, I16)
        even = b.call(f"llvm.x86.{by_words}", [w & 0xFF, b.shift_right_signed(x << 8, 8)], result)
        return even + b.call(f"llvm.x86.{by_words}", [w >> 8, b.shift_right_signed(x, 8)], result)

    # AMX tiles

    def _emit_tiles(self, b: Builder, x: Value, rows: Value, block: Value, sink: RowSink) -> None:
        """Multiply two panels of 16 rows at a time with AMX tiles, so that each loaded and unpacked tile is used twice;
        then the last panel. Rows past the last are computed but not passed to `sink`.

        The first panels read the weights from memory, and prefetch them; so int8 takes 11 to 19 % less time for 16 to
        64 rows (Sapphire Rapids).
        """
        totals, result, unpacked = (b.scratch(2 * TILE_ROWS * 2 * LINE) for _ in range(3))
        pairs = (rows + (TILE_ROWS - 1)) // (2 * TILE_ROWS) * (2 * TILE_ROWS)
        for panels, start, stop in ((2, b.index(0), pairs), (1, pairs, rows)):
            with b.loop(start, stop, panels * TILE_ROWS) as first:
                count = (rows - first.index).min(panels * TILE_ROWS)
                bases = [self.panel(b, x, first.index + TILE_ROWS * i) for i in range(panels)]
                with b.loop(0, panels * TILE_ROWS * 2) as line:
                    b.store(b.constant(0.0, VF32), result, line.index * LINE, 64)
                with b.loop(0, self.format.groups(self.k) // self.shared) as group:
                    for part in range(self.shared):
                        columns = ColumnGroup(block, group.index * self.shared + part, part)
                        self._tile_sums(b, bases, columns, totals, unpacked, b.compare("eq", first.index, 0))
                        with b.loop(0, count) as row:
                            x_panel = self.panel(b, bases[0], row.index)
                            x_scales = b.address(self.panel_scales(b, x_panel, group.index), row.index % TILE_ROWS * 4)
                            self._scale_row(b, x_scales, row.index, columns, totals, result)
                sink.take(b, first.index, count, result)

    def _scale_row(
        self, b: Builder, x_scales: Value, row: Value, group: ColumnGroup, totals: Value, result: Value
    ) -> None:
        """Add a group's scaled sums of one row to its result."""
        header = self.header(b, group.block, group.number)
        x_sum, at = self.x_sum(b, x_scales, 0, group.part), row * (2 * LINE)
        start = self.start(b, header, b.broadcast(x_sum))
        sums = [b.load(totals, at + LINE * tile, VI32, 64) + start[tile] for tile in range(2)]
        before = [b.load(result, at + LINE * tile, VF32, 64) for tile in range(2)]
        scaled = self.add_scaled(b, header, group.number, sums, b.load(x_scales, 0, F32), x_sum, before)
        for tile, value in enumerate(scaled):
            b.store(value, result, at + LINE * tile, 64)

    def _tile_sums(
        self, b: Builder, panels: Sequence[Value], group: ColumnGroup, totals: Value, unpacked: Value, prefetches: Value
    ) -> None:
        """Store the group's products of the panels, without the start, as i32 [row][32 columns]."""
        lines = self.lines(b, group.block, group.number)
        span = self.format.span(self.k)
        step = min(span, LINE)
        rows, k_bytes, line = b.constant(TILE_ROWS, I16), b.constant(step, I16), b.constant(LINE, I16)
        tile_lines = b.constant(step // 4, I16)
        zeros = [b.call("llvm.x86.tilezero.internal", [rows, line], TILE) for _ in range(2 * len(panels))]
        with b.loop(0, span // step, state=zeros) as piece:
            k = group.number * span + piece.index * step
            size = step * self.format.bits // 16 * LINE
            at = b.address(lines, piece.index * size)
            if group.part == 0 and self.format.scales != "super":
                with b.when(prefetches):
                    for ahead in range(0, size * self.shared, LINE):
                        b.prefetch(at, STREAM_BYTES + ahead, level=2)
            weights = []
            for column in range(2):
                source, stride = self._tile_lines(b, at, column, step // 4, group.part, unpacked)
                operands = [tile_lines, line, source, b.constant(stride, I64)]
                weights.append(b.call("llvm.x86.tileloadd64.internal", operands, TILE))
            state = []
            for i, panel in enumerate(panels):
                values = b.address(panel, k // LINE * (TILE_ROWS * LINE) + k % LINE)
                a = b.call("llvm.x86.tileloaddt164.internal", [rows, k_bytes, values, b.constant(LINE, I64)], TILE)
                for column, w in enumerate(weights):
                    operands = [rows, line, k_bytes, piece.state[2 * i + column], a, w]
                    state.append(b.call("llvm.x86.tdpbsud.internal", operands, TILE))
            piece.carry(*state)
        for i, total in enumerate(piece.results):
            at = b.address(totals, i // 2 * (TILE_ROWS * 2 * LINE) + i % 2 * LINE)
            b.call_void("llvm.x86.tilestored64.internal", [rows, line, at, b.constant(2 * LINE, I64), total])

    def _tile_lines(
        self, b: Builder, units: Value, tile: int, quads: int, part: int, unpacked: Value
    ) -> tuple[Value, int]:
        """Return the address of `quads` fours of k of one tile, and the stride of their lines in bytes.

        They begin with the unit at `units`; those of a group of 16 are its half number `part`.
        """
        if self.format.bits == 8:
            return b.address(units, tile * LINE), 2 * LINE
        unpacked = b.address(unpacked, tile * (TILE_ROWS * LINE))
        for first in range(0, quads, QUADS):
            unit = b.address(units, first // QUADS * (self.format.bits * 2 * LINE))
            count = min(quads, QUADS)
            for i, value in enumerate(self.quads(b, unit, tile, part * count if self.shared > 1 else 0, count)):
                b.store(value, unpacked, (first + i) * LINE, 64)
        return unpacked, LINE


def _chunks(count: Value) -> list[tuple[int, Value]]:
    """Return numbers of rows to compute at once, and how often each, to compute `count` rows in all."""
    fours = count // ROWS_AT_ONCE
    fours = fours - fours.min((count % ROWS_AT_ONCE % 3 + 1) // 2)
    left = count - fours * ROWS_AT_ONCE  # 0, 1, 2, 3, 5 or 6
    fives = left // 5 - left // 6
    after = left - fives * 5
    threes = after // 3
    rest = after - threes * 3
    return [(ROWS_AT_ONCE, fours), (5, fives), (3, threes), (2, rest // 2), (1, rest % 2)]
