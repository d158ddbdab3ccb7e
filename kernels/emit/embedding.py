"""The kernel of embeddings, whose work item is a token."""

from __future__ import annotations

from dataclasses import dataclass

from quire.kernels.emit.adapted_rows import AdaptedRows, RowForm
from quire.kernels.emit.adapters import RowAdapters
from quire.kernels.emit.builder import F32, I32, VF32, Builder, Value, vector
from quire.kernels.emit.context import EmitContext, Kernel
from quire.kernels.emit.layout import (
    BLOCK,
    PAIRS,
    TILE_ROWS,
    Dtypes,
    QuantizedFormat,
    load_packed_pair,
    round_up,
)
from quire.kernels.emit.quantized_operands import QUADS
from quire.kernels.emit.quantized_row import QuantizedRow
from quire.kernels.emit.rotation import rotated_row


@dataclass(frozen=True)
class EmbeddingKernel(Kernel):
    """Gathers rows of the packed embedding matrix, times `scale`, into the f32 hidden states.

    Buffers: token ids (i32), matrix (packed [vocabulary, width]), hidden states f32 [m, width rounded up to 32], and
    with `types`, the number of token types, those (i32) and the table f32 [types, width] of the embeddings to add, then
    with `positions` the same of positions. With `lookahead`, the size of the vocabulary, the token of that number has
    the embedding in the last buffer, f32 [width]. `quantized` is the matrix's format if it is quantized, one without
    zero points. With `table_rows`, tokens from that number on have the first row of the matrix. With `adapted`, rows
    may have adapters: buffers 3 and 4 are those of rows (i32) and the table of adapted_rows.py.
    """

    width: int
    positions: bool = False
    quantized: QuantizedFormat | None = None
    scale: float = 1.0
    types: int = 0
    lookahead: int = 0
    adapted: bool = False
    table_rows: int = 0

    def build(self, b: Builder, context: EmitContext) -> None:
        """See Kernel."""
        ids, matrix, out = b.buffer(0), b.buffer(1), b.buffer(2)
        with b.items() as row:
            token = b.convert("arith.extui", b.load(ids, row * 4, I32), "i64")
            target = b.address(out, row * (round_up(self.width, BLOCK) * 4))
            if self.lookahead:
                is_lookahead = b.compare("eq", token, self.lookahead)
                token = b.select(is_lookahead, b.index(0), token)
            if self.table_rows:
                token = b.select(b.compare("ult", token, self.table_rows), token, b.index(0))
            if self.quantized is not None:
                self._gather_quantized(b, self.quantized, matrix, token, target)
            else:
                self._gather(b, context.dtypes, matrix, token, target)
            numbers = iter(range(3, 10))
            if self.adapted:
                rows = AdaptedRows(RowAdapters(b.buffer(next(numbers))), b.buffer(next(numbers)))
                rows.apply(b, context.dtypes, row, token, target, RowForm(self.width, self.scale))
            if self.types:
                self._add_row(b, target, row, b.buffer(next(numbers)), b.buffer(next(numbers)), only=self.types == 1)
            if self.positions:
                self._add_row(b, target, row, b.buffer(next(numbers)), b.buffer(next(numbers)))
            if self.lookahead:
                with b.when(is_lookahead), b.each(0, self.width // 16) as part:
                    at = part.index * 64
                    b.store(b.load(b.buffer(next(numbers)), at, VF32, 4), target, at, 64)

    def _scaled(self, value: Value) -> Value:
        return value if self.scale == 1 else value * self.scale

    def _gather(self, b: Builder, dtypes: Dtypes, matrix: Value, token: Value, target: Value) -> None:
        blocks = round_up(self.width, BLOCK) // BLOCK
        lane_bytes = 4  # bf16: one (even, odd) pair; f32: one element, its partner 64 bytes on
        column = b.address(matrix, token // BLOCK * (blocks * dtypes.block_bytes))
        offset = token % BLOCK // TILE_ROWS * dtypes.tile_bytes + token % TILE_ROWS * lane_bytes
        with b.each_scalar(0, blocks * PAIRS) as pair:
            source = b.address(column, pair.index // PAIRS * dtypes.block_bytes)
            at = b.address(target, pair.index * 8)
            for i, value in enumerate(load_packed_pair(b, dtypes, source, offset, pair.index % PAIRS)):
                b.store(self._scaled(value), at, 4 * i)

    def _gather_quantized(
        self, b: Builder, quantized: QuantizedFormat, matrix: Value, token: Value, target: Value
    ) -> None:
        block, column = b.address(matrix, token // BLOCK * quantized.block_bytes(self.width)), token % BLOCK
        row, width = QuantizedRow(quantized, self.width), self.width
        table, hidden = row.codebook(b), target
        if quantized.rotated:
            width = quantized.depth(self.width)
            target = b.scratch(width * 4)
        with b.each(0, -(-width // BLOCK)) as unit:
            group = unit.index * BLOCK // quantized.span(self.width)
            for part in range(row.shared):
                scale, least = row.scale_and_minimum(b, block, group + part, column)
                first, count = part * QUADS // row.shared, QUADS // row.shared
                stop = (b.index(width // 4) - unit.index * QUADS).min(first + count)
                with b.loop(first, stop) as quad:
                    values = row.quad(b, row.unit(b, block, unit.index), column, quad.index, table)
                    floats = b.convert("arith.sitofp", values - quantized.middle, vector(F32, 4)) * scale
                    if least is not None:
                        floats = floats - least
                    b.store(self._scaled(floats), target, (unit.index * QUADS + quad.index) * 16, 4)
        if quantized.rotated:
            load = rotated_row(b, quantized, width, lambda part: b.load(target, part * 64, VF32, 64))
            with b.each(0, self.width // 16) as lanes:
                b.store(load(lanes.index), hidden, lanes.index * 64, 64)

    def _add_row(
        self, b: Builder, target: Value, row: Value, numbers: Value, table: Value, *, only: bool = False
    ) -> None:
        """Add the row of `table` that `numbers` names, or the only one that there is."""
        if not only:
            number = b.convert("arith.extui", b.load(numbers, row * 4, I32), "i64")
            table = b.address(table, number * (self.width * 4))
        with b.each(0, self.width // 16) as part:
            at = part.index * 64
            b.store(b.load(target, at, VF32, 64) + b.load(table, at, VF32, 4), target, at, 64)
