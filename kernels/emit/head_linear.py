"""Products of each head with a matrix of its own, as latent attention needs before and after attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from quire.kernels.attention_heads import Heads
from quire.kernels.emit.builder import Builder, Value
from quire.kernels.emit.context import EmitContext, Kernel
from quire.kernels.emit.kv import KvLayout
from quire.kernels.emit.layout import BLOCK, TILE_ROWS, packed_offset, store_activation
from quire.kernels.emit.products import ColumnSink, PackedColumns, Panels


@dataclass(frozen=True)
class HeadLinearKernel(Kernel):
    """y[m, head, n] = sum_k x[m, head, k] w[head, n, k], for `count` heads of `k` inputs and `n` outputs each.

    Work items are blocks of 32 columns times groups of `rows_per_item` rows. Buffers: x (packed activations of
    count * k columns), w (packed, count * n columns), y. `k` and `n` are multiples of 32.

    `output`: `activations` are packed, of count * n columns; `queries` are those of `heads`, of which y are the
    elements from number `first` on.
    """

    count: int
    k: int
    n: int
    output: Literal["activations", "queries"] = "activations"
    heads: Heads | None = None
    first: int = 0

    def operations(self, rows: int, pairs: int) -> int:
        """See Kernel."""
        return 2 * self.count * self.k * self.n * rows

    @property
    def shape(self) -> str:
        """See Kernel."""
        return f"{self.count} x {self.k} x {self.n}"

    def build(self, b: Builder, context: EmitContext) -> None:
        """See Kernel."""
        dtypes = context.dtypes
        x, w, y = (b.buffer(i) for i in range(3))
        size, blocks = context.rows_per_item, self.k // BLOCK
        row_bytes = BLOCK * dtypes.activation_bytes
        panel_bytes = self.count * blocks * TILE_ROWS * row_bytes
        rows = b.dim("tokens")
        groups = (rows + (size - 1)) // size
        with b.items() as item:
            number, first = item // groups, item % groups * size
            of_head = self.n // BLOCK
            head, within = number // of_head, number % of_head
            start = first // TILE_ROWS * panel_bytes + head * (blocks * TILE_ROWS * row_bytes)
            operand = Panels(b.address(x, start), row_bytes, TILE_ROWS * row_bytes, panel_bytes)
            count = (rows - first).min(size)

            def columns(block: Value) -> PackedColumns:
                base = b.address(w, (head * of_head + block) * (blocks * dtypes.block_bytes))
                return context.products.streamed(b, blocks, base, count)

            def store(block: Value, row: Value, values: Sequence[Value]) -> None:
                for i, value in enumerate(values):
                    at = self._offset(context, first + row, head, (head * of_head + block) * BLOCK + 16 * i)
                    store_activation(b, dtypes, value, y, at)

            context.products.emit_item(b, operand, count, within, of_head, columns, ColumnSink(store))

    def _offset(self, context: EmitContext, row: Value, head: Value, column: Value) -> Value:
        """Return the offset of y[row, head, column - head * n]."""
        if self.output == "activations" or self.heads is None:
            return packed_offset(context.dtypes, self.count * self.n, row, column)
        query = (row * self.count + head) * KvLayout(self.heads, context.dtypes).query_bytes
        return query + (column - head * self.n + self.first) * context.dtypes.activation_bytes
