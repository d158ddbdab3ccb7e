"""Products of many quantized rows with packed quantized weights on tensor cores: emit/quantized.py has the order.

A block multiplies 128 rows by `across` blocks of 32 columns. Units of 32 k of both operands are copied to shared memory
as they are packed, some while others are multiplied. A warp has 16 `across` rows and 32 columns; of each 16 rows it
multiplies 16 x 32 bytes by 32 x 8, four times, which is exact. As integer sums may have any order, a thread's k are
those that lie together: of a row eight k, of four columns two fours of k. It gets the sums of eight neighbouring
columns in two rows, and scales them group by group in registers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from quire.kernels.emit.builder import F16, F32, I8, I16, I32, I64, VF32, VI32, Value
from quire.kernels.emit.cuda.blocks import BlockBuilder
from quire.kernels.emit.cuda.threads import SHARED_BYTES, WARP
from quire.kernels.emit.dots import look_up
from quire.kernels.emit.layout import BLOCK, TILE_ROWS
from quire.kernels.emit.products import ColumnSink
from quire.kernels.emit.quantized_operands import LINE, DotOperands

ROWS = 128
"""Rows of a tile."""

MEMORY_BYTES = SHARED_BYTES
"""Shared memory of a tile: two blocks of threads fit a multiprocessor of every GPU."""

COLUMNS = 8
"""Neighbouring columns whose sums a thread has."""

PIECE = 16
"""Bytes that are copied at a time: half a unit of a row of x, or four columns of a line of weights."""

_HALVES = 2 * BLOCK  # bytes of an f16 or i16 for each column
_PIECES = 2 * LINE // PIECE  # of a line of weights
_X_BYTES = ROWS * BLOCK  # of a unit of x
_ROW_BYTES = 4 * BLOCK  # of products of a row and a block of columns
_TOTALS_BYTES = 32 << 10  # of products that are passed on at a time
_OUTPUTS = 2 * COLUMNS  # a thread's sums of 16 rows


@dataclass(frozen=True)
class _Lane:
    """A thread's place in its warp: of 16 rows two, `row` and `row` + 8, and eight columns, or two fours of k, of
    `part`. Of weights it reads the four columns that begin with 4 `row`."""

    row: Value
    part: Value

    @classmethod
    def of(cls, b: BlockBuilder) -> _Lane:
        return cls(b.thread % WARP // 4, b.thread % 4)


@dataclass(frozen=True)
class _Addresses:
    """Addresses of what a thread copies and reads: in the panels and the packed weights, and in the first unit in
    shared memory."""

    x_source: Value
    x_target: Value
    weights_source: Value
    weights_target: Value
    x: Value
    weights: Value


@dataclass(frozen=True)
class QuantizedTile(DotOperands):
    """The product of `rows` rows, at most 128, of the panels at `x` with `across` blocks of columns, 1, 2 or 4, from
    number `block` of `count` on, and `memory` for it."""

    across: int
    memory: Value
    x: Value
    rows: Value
    block: Value
    count: int
    columns: Callable[[Value], Value]

    def emit(self, b: BlockBuilder, sink: ColumnSink) -> None:
        """Call `sink` with every row of products of all blocks; all threads of a block must come here."""
        totals, lane = self._multiply(b), _Lane.of(b)
        size, at_once = self.across * _ROW_BYTES, min(_TOTALS_BYTES // (self.across * _ROW_BYTES), ROWS)
        first = self._first_row(b)
        b.barrier()
        with b.loop(0, ROWS // at_once) as turn:
            with b.when(b.compare("eq", first // at_once, turn.index) & (first < self.rows)):
                place = (first % at_once + lane.row) * size + self._number(b) * _ROW_BYTES
                target = b.address(self.memory, place + lane.part * (4 * COLUMNS))
                for i in range(0, len(totals), 4):
                    below = i // _OUTPUTS * TILE_ROWS + i % _OUTPUTS // COLUMNS * 8
                    b.store_own(totals[i : i + 4], target, below * size + i % COLUMNS * 4)
            done = turn.index * at_once
            with b.each(0, (self.rows - done).min(at_once) * self.across) as task:
                row, number = task.index // self.across, task.index % self.across
                with b.when(self.block + number < self.count):
                    at = b.address(self.memory, row * size + number * _ROW_BYTES)
                    sink(self.block + number, done + row, [b.load(at, LINE * tile, VF32) for tile in range(2)])

    def _multiply(self, b: BlockBuilder) -> list[Value]:
        """Return the thread's products, [16 rows][row][column]."""
        stages, ahead, at = self._groups * self._stages_of_group, self._stages - 1, self._addresses(b)
        with b.loop(0, ahead) as first:
            with b.when(first.index < stages):
                self._copy(b, at, first.index)
            b.end_pieces()
        once = b.select(self._first_row(b) < self.rows, b.index(1), b.index(0))
        outputs = self.across * _OUTPUTS
        with b.loop(0, self._groups, state=[b.constant(0.0, F32)] * outputs) as group:
            zeros = [b.constant(0, I32)] * (outputs * self.shared)
            with b.loop(0, self._stages_of_group, state=zeros) as part:
                stage = group.index * self._stages_of_group + part.index
                b.await_pieces(ahead - 1)
                b.barrier()
                with b.when(stage + ahead < stages):
                    self._copy(b, at, stage + ahead)
                b.end_pieces()
                with b.loop(0, once, state=part.state) as mine:
                    place, sums = self._place(b, stage), list(mine.state)
                    for unit in range(self._units):
                        sums = self._add_unit(b, at, place + unit * self._unit_bytes, sums)
                    mine.carry(*sums)
                part.carry(*mine.results)
            with b.loop(0, once, state=group.state) as mine:
                mine.carry(*self._scaled(b, group.index, part.results, mine.state))
            group.carry(*mine.results)
        return group.results

    def _first_row(self, b: BlockBuilder) -> Value:
        """Return the number of the warp's first row."""
        return b.thread // WARP // self.across * (self.across * TILE_ROWS)

    def _number(self, b: BlockBuilder) -> Value:
        """Return the number of the warp's block of columns."""
        return b.thread // WARP % self.across

    def _columns(self, number: Value) -> Value:
        """Return the address of a block of columns of the tile; of one past the last that of the last."""
        return self.columns((self.block + number).min(self.count - 1))

    # Copies

    @property
    def _groups(self) -> int:
        """Groups of activations."""
        return self.format.groups(self.k) // self.shared

    @property
    def _units(self) -> int:
        """Units that are copied at a time, a stage: two if groups have an even number of them."""
        return 1 if self.format.span(self.k) % (2 * BLOCK) else 2

    @property
    def _stages_of_group(self) -> int:
        return max(self.format.span(self.k) // (self._units * BLOCK), 1)

    @property
    def _unit_bytes(self) -> int:
        """Bytes of a unit of both operands."""
        return _X_BYTES + self.across * self._block_unit_bytes

    @property
    def _block_unit_bytes(self) -> int:
        """Bytes of a unit of weights of a block of columns."""
        return self.format.bits * 2 * LINE

    @property
    def _stages(self) -> int:
        """Stages that the memory has room for."""
        return MEMORY_BYTES // (self._units * self._unit_bytes)

    def _place(self, b: BlockBuilder, stage: Value) -> Value:
        """Return how many bytes after the first stage in shared memory a stage is."""
        number = b.convert("arith.extui", b.convert("arith.trunci", stage, I32) % self._stages, I64)
        return number * (self._units * self._unit_bytes)

    def _addresses(self, b: BlockBuilder) -> _Addresses:
        """Return the thread's addresses: it copies half a row of x and a piece of weights, if there are so many."""
        lane, first, row, half = _Lane.of(b), self._first_row(b), b.thread // 2, b.thread % 2
        pieces = self.format.bits * _PIECES
        block, piece = b.thread // pieces, b.thread % pieces
        weights = b.address(self.memory, _X_BYTES)
        place = block * self._block_unit_bytes + self._piece(piece // _PIECES, piece % _PIECES)
        return _Addresses(
            b.address(self.panel(b, self.x, row), row % TILE_ROWS * LINE + half * PIECE),
            b.address(self.memory, row * BLOCK + half * PIECE),
            b.address(self._columns(block), piece * PIECE),
            b.address(weights, place),
            b.address(self.memory, (first + lane.row) * BLOCK + lane.part * 8),
            b.address(weights, self._number(b) * self._block_unit_bytes),
        )

    def _copy(self, b: BlockBuilder, at: _Addresses, stage: Value) -> None:
        """Begin to copy a stage."""
        group, part = stage // self._stages_of_group, stage % self._stages_of_group
        place = self._place(b, stage)
        with b.when(b.thread // 2 < self.rows):
            for unit in range(self._units):
                k = (stage * self._units + unit) * BLOCK
                source = k // LINE * (TILE_ROWS * LINE) + k % LINE
                b.copy_piece(at.x_source, source, at.x_target, place + unit * self._unit_bytes)
        with b.when(b.thread < self.across * self.format.bits * _PIECES):
            lines = self.lines(b, at.weights_source, group * self.shared)
            for unit in range(self._units):
                source = (part * self._units + unit) * self._block_unit_bytes
                b.copy_piece(lines, source, at.weights_target, place + unit * self._unit_bytes)

    def _piece(self, line: Value, columns: Value) -> Value:
        """Return where a piece of a line of a unit is: so that pieces of two neighbours and of all lines that a warp
        reads at a time lie in different banks."""
        return line * (2 * LINE) + (columns ^ line // (2 if self.format.bits == 8 else 1) * 2 % _PIECES) * PIECE

    # Integer sums

    def _add_unit(self, b: BlockBuilder, at: _Addresses, place: Value, sums: Sequence[Value]) -> list[Value]:
        """Return `sums`, [group of weights][16 rows][number of a product][row][first or last four columns], plus those
        of a unit so many bytes after the first one in shared memory."""
        lane, x, weights, results = _Lane.of(b), b.address(at.x, place), b.address(at.weights, place), list(sums)
        fours = [self._four(b, weights, lane.part * 2 + i, lane.row) for i in range(2)]
        for panel in range(self.across):
            upper, lower = (b.load_own(x, (panel * TILE_ROWS + 8 * r) * BLOCK, I32, 2) for r in range(2))
            for part in range(self.shared):
                for i in range(4):
                    columns = [self._of_part(b, four[i], part, lane) for four in fours]
                    first = (part * self.across + panel) * _OUTPUTS + 4 * i
                    rows = [upper[0], lower[0], upper[1], lower[1]]
                    results[first : first + 4] = b.multiply_tiles(rows, columns, results[first : first + 4])
        return results

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
            words = b.load_own(unit, self._piece(number // each + line, columns), I32, 4)
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

    def _scaled(self, b: BlockBuilder, group: Value, sums: Sequence[Value], totals: Sequence[Value]) -> list[Value]:
        """Return `totals` plus the scaled sums of a group of activations; see _multiply and _add_unit."""
        block, last = self._columns(self._number(b)), self.rows - 1
        panels = [self.panel(b, self.x, (self._first_row(b) + TILE_ROWS * i).min(last)) for i in range(self.across)]
        results = list(totals)
        for part in range(self.shared):
            some = sums[part * len(totals) : (part + 1) * len(totals)]
            results = self._scaled_part(b, panels, block, group, part, some, results)
        return results

    def _scaled_part(
        self, b: BlockBuilder, panels: Sequence[Value], block: Value, x_group: Value, part: int,
        sums: Sequence[Value], totals: Sequence[Value],
    ) -> list[Value]:  # fmt: skip
        """Return `totals` plus the scaled sums of a group of weights."""
        lane, group = _Lane.of(b), x_group * self.shared + part
        header, column = self.header(b, block, group), lane.part * COLUMNS
        scales, mins = self._scales_of(b, header, group, column)
        zeros = self._shorts(b, header, self.format.header_bytes - LINE, column) if self.format.zeros else None
        results: list[Value] = []
        for number in range(2 * len(panels)):
            panel, r = divmod(number, 2)
            x_scales = b.address(self.panel_scales(b, panels[panel], x_group), (lane.row + 8 * r) * 4)
            scale, x_sum = b.load(x_scales, 0, F32), self.x_sum(b, x_scales, 0, part)
            subtracted = scale * b.convert("arith.sitofp", x_sum, F32) * -1.0 if mins else None
            for c in range(COLUMNS):
                exact = sums[panel * _OUTPUTS + c % 4 * 4 + r * 2 + c // 4]
                if zeros is not None:
                    exact = exact + zeros[c] * x_sum * -1
                elif self.middle:
                    exact = exact + x_sum * -self.middle
                total = b.fma(b.convert("arith.sitofp", exact, F32), scales[c] * scale, totals[len(results)])
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
