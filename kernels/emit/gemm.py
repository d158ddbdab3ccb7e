"""GEMM over packed weights: y[m, n] = sum_k x[m, k] w[n, k], with what follows it fused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quire.kernels.emit.builder import Builder
from quire.kernels.emit.integers import IntegerProducts
from quire.kernels.emit.layout import BLOCK, TILE_ROWS, IntegerFormat, round_up, store_activation, tiled_offset
from quire.kernels.emit.math import ACTIVATIONS
from quire.kernels.emit.products import FAR_BYTES, NEAR_BYTES, Columns, Operand, Products, RowSink
from quire.kernels.emit.value import VF32, Value

ROWS_PER_ITEM = 64
"""Rows of one work item: few enough to spread a long prefill over threads, many enough to reuse a weight block."""


@dataclass(frozen=True)
class Gemm:
    """One GEMM kernel.

    Work items are blocks of 32 columns times groups of 64 rows. Buffers: x (tiled activations, `k` columns), w (packed,
    `n` columns), y, and the f32 bias when `bias`. Dims: `rows` is the number of the dim that holds M.

    `epilogue`: `store` writes f32 `y[m, n]`, row-major with n rounded up to 32; `add` adds to it; `activation` writes
    `act(y)` as tiled activations; `gate` takes columns in pairs of tiles (16 gates, 16 ups) and writes
    `act(gate) * up` as tiled activations of n / 2 columns. `integers`: the format of the weights if they are integers;
    x is then quantized for it.
    """

    name: str
    k: int
    n: int
    epilogue: str = "store"
    bias: bool = False
    activation: str = ""
    rows: int = 0
    integers: IntegerFormat | None = None

    def operations(self, rows: int) -> int:
        """Multiplications and additions for that many rows."""
        return 2 * self.k * self.n * rows

    def emit(self, products: Products) -> str:
        """The kernel as MLIR text."""
        b = Builder(self.name)
        x, w, y = b.buffer(0), b.buffer(1), b.buffer(2)
        bias = b.buffer(3) if self.bias else None
        rows = b.dim(self.rows)
        groups = (rows + (ROWS_PER_ITEM - 1)) // ROWS_PER_ITEM
        with b.items() as item:
            column_block = item // groups
            first = item % groups * ROWS_PER_ITEM

            def sink(row: Value, values: Sequence[Value]) -> None:
                self._finish(b, products, y, bias, first + row, column_block, values)

            count = (rows - first).min(ROWS_PER_ITEM)
            self._multiply(b, products, x, w, first // TILE_ROWS, count, column_block, sink)
        return b.text()

    def _multiply(
        self, b: Builder, products: Products, x: Value, w: Value, panel: Value, rows: Value, block: Value, sink: RowSink
    ) -> None:
        """Feeds `sink` with `rows` rows of x, from panel number `panel` on, times block number `block` of w."""
        if self.integers is not None:
            panels = b.address(x, panel * self.integers.panel_bytes(self.k))
            columns = b.address(w, block * self.integers.block_bytes(self.k))
            IntegerProducts(products.isa, self.integers, self.k).emit(b, panels, rows, columns, sink)
            return
        numbers = products.numbers
        blocks = round_up(self.k, BLOCK) // BLOCK
        row_bytes = BLOCK * numbers.activation_bytes
        panel_bytes = blocks * TILE_ROWS * row_bytes
        operand = Operand(b.address(x, panel * panel_bytes), row_bytes, TILE_ROWS * row_bytes, panel_bytes)
        base = b.address(w, block * (blocks * numbers.block_bytes))

        def ahead(j: Value) -> list[Value]:
            return [b.address(base, j * numbers.block_bytes + FAR_BYTES)]

        packed = Columns(blocks, lambda j: b.address(base, j * numbers.block_bytes), ahead, NEAR_BYTES)
        products.emit(b, operand, rows, packed, sink)

    def _finish(
        self, b: Builder, products: Products, y: Value, bias: Value | None, row: Value, block: Value,
        values: Sequence[Value],
    ) -> None:  # fmt: skip
        if bias is not None:
            values = [v + b.load(bias, block * (BLOCK * 4) + 64 * i, VF32, 64) for i, v in enumerate(values)]
        if self.epilogue in ("store", "add"):
            at = b.address(y, (row * round_up(self.n, BLOCK) + block * BLOCK) * 4)
            for i, value in enumerate(values):
                total = value + b.load(at, 64 * i, VF32, 64) if self.epilogue == "add" else value
                b.store(total, at, 64 * i, 64)
            return
        act = ACTIVATIONS[self.activation]
        if self.epilogue == "gate":
            outputs, width = [act(b, values[0]) * values[1]], round_up(self.n, BLOCK) // 2
        else:
            outputs, width = [act(b, v) for v in values], round_up(self.n, BLOCK)
        for i, value in enumerate(outputs):
            column = block * (16 * len(outputs)) + 16 * i
            store_activation(b, products.numbers, value, y, tiled_offset(products.numbers, width, row, column))
