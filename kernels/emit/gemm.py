"""GEMM over packed weights, y[m, n] = sum_k x[m, k] w[n, k], with a fused epilogue."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quire.kernels.activations import ClampedSwiglu, FixedActivation
from quire.kernels.emit.adapted_spans import SPAN_BLOCKS, AdaptedSpan, SpanSink
from quire.kernels.emit.adapters import AdapterOperands, AdaptingSink, RowAdapters
from quire.kernels.emit.builder import I1, VF32, VI32, Builder, Value
from quire.kernels.emit.context import EmitContext, Kernel
from quire.kernels.emit.dots import CUDA
from quire.kernels.emit.layout import (
    BLOCK,
    TILE_ROWS,
    Dtypes,
    QuantizedFormat,
    packed_offset,
    round_up,
    store_activation,
)
from quire.kernels.emit.math import activation, clamped_swiglu, softcap, xielu
from quire.kernels.emit.products import LINE, ColumnSink, PackedColumns, Panels

STRIPE_BLOCKS = 32
"""Blocks of columns by which a CPU multiplies a group of rows before the next group: its rows stay in the second-level
cache. Stripes are narrow enough that the columns of a matrix are still divided among the nodes of memory."""

XIELU = "xielu"
"""The activation whose parameters are an operand."""


@dataclass(frozen=True)
class GemmItem:
    """One of `items` work items: `rows` rows of x, from panel number `panel` on, times block number `block` of 32
    columns, of which there are `blocks`."""

    panel: Value
    rows: Value
    block: Value
    blocks: int
    items: Value


@dataclass(frozen=True)
class GemmOutput:
    """Addresses of y, of the bias of its columns, of the rows by which `gated` and `gating` multiply, of xIELU's
    parameters, and of what adapters of rows read; and a mask of the columns that are stored, i32 [32], if not all are.
    """

    y: Value
    bias: Value | None = None
    factors: Value | None = None
    parameters: Value | None = None
    adapters: AdapterOperands | None = None
    mask: Value | None = None


@dataclass(frozen=True)
class GemmKernel(Kernel):
    """One GEMM.

    Work items are blocks of 32 columns times groups of `rows_per_item` rows, in the order of `_place`: few enough to
    spread a long prefill over threads, many enough to reuse a block of weights. Buffers: x (packed activations, `k`
    columns), w (packed, `n` columns), y, the f32 bias if `bias`, and the rows that `gated` and `gating` read, or the
    f32 parameters of the activation `xielu`. The dim called `dim` is m. `quantized` is the weights' format if they are
    quantized; x is then quantized for it.

    `epilogue`: `store` writes f32 `scale * y[m, n]`, row-major with n rounded up to 32, with `softcap` as
    `softcap * tanh(scale * y / softcap)`; `add` adds `scale * y` to it; `activation` writes `act(y)` as packed
    activations; `gate` takes columns in pairs of tiles (16 gates, 16 ups) and writes `act(gate) * up` as packed
    activations of n / 2 columns, and `gated` takes ups, and gates from f32 rows like those of `store`; a ClampedSwiglu
    takes both; `gating` takes gates, and ups from such rows.

    Rows of y, or those that are read, have `y_columns` columns, by default n; those of y begin with number `first`.

    With `adapter_tiles`, rows may have adapters whose short vectors have so many tiles: the last buffers are the
    adapters of a step's rows, the numbers of those that have logits if `dim` counts these, the table, and the short
    vectors; see adapters.py.
    """

    k: int
    n: int
    epilogue: str = "store"
    bias: bool = False
    activation: FixedActivation = ""
    dim: str = "tokens"
    quantized: QuantizedFormat | None = None
    scale: float = 1.0
    softcap: float = 0.0
    y_columns: int = 0
    first: int = 0
    adapter_tiles: int = 0

    def operations(self, rows: int, pairs: int) -> int:
        """See Kernel."""
        return 2 * self.k * self.n * rows

    def unit(self, context: EmitContext) -> str:
        """See Kernel."""
        if self.quantized is None:
            return super().unit(context)
        if context.isa in ("avx512", "avx2"):
            return "vpmaddwd" if self.quantized.bits == 8 else "vpmaddubsw"
        return {"amx": "amx-int8", "neon-dotprod": "sdot", "neon": "smull"}.get(context.isa, "vnni")

    @property
    def shape(self) -> str:
        """See Kernel."""
        return f"{self.k} x {self.n}"

    def build(self, b: Builder, context: EmitContext) -> None:
        """See Kernel."""
        x, w, y = b.buffer(0), b.buffer(1), b.buffer(2)
        bias = b.buffer(3) if self.bias else None
        factors = b.buffer(3 + self.bias) if self.epilogue in ("gated", "gating") else None
        parameters = b.buffer(3 + self.bias) if self.activation == XIELU else None
        number = 3 + self.bias + (factors is not None) + (parameters is not None)
        adapters = self._adapters(b, number) if self.adapter_tiles else None
        output = GemmOutput(y, bias, factors, parameters, adapters)
        rows, size = b.dim(self.dim), context.rows_per_item
        groups = (rows + (size - 1)) // size

        def multiply(item: Value, span: AdaptedSpan | None = None) -> None:
            block, group = self._place(b, context, item, groups)
            first = group * size
            count = self._count(b, first, (rows - first).min(size))
            sink = self._sink(b, context, output, first)
            if span is not None:
                sink = SpanSink(span, sink)
            if adapters is not None:
                with b.when(b.constant(1, I1) if span is None else b.compare("eq", span.is_used, 0)):
                    adapters.prefetch(b, context.dtypes, first, count, block)
            part = GemmItem(first // TILE_ROWS, count, block, self._blocks, groups * self._blocks)
            self._multiply(b, context, x, w, part, sink)

        if adapters is None or self.quantized is not None or context.isa == CUDA:
            with b.items() as item:
                multiply(item)
            return
        with b.loop(b.begin, b.end, SPAN_BLOCKS) as start:
            stop, first = (start.index + SPAN_BLOCKS).min(b.end), start.index
            span = AdaptedSpan.of(b, adapters, self._count(b, b.index(0), rows), first, groups)
            with b.loop(first, stop) as each:
                multiply(each.index, span)
            span.finish(b, context.dtypes, stop - first, self._plain_sink(b, context, output, b.index(0)))

    def _place(self, b: Builder, context: EmitContext, item: Value, groups: Value) -> tuple[Value, Value]:
        """Return the block of columns and the group of rows of an item."""
        if context.isa == CUDA:  # whose blocks of threads compute many items at a time
            return item // groups, item % groups
        first = item // (groups * STRIPE_BLOCKS) * STRIPE_BLOCKS
        width = (b.index(self._blocks) - first).min(STRIPE_BLOCKS)
        within = item - first * groups
        return first + within % width, within // width

    def _count(self, b: Builder, first: Value, count: Value) -> Value:
        """Return how many of `count` rows from number `first` on are computed: all or none."""
        return count

    def _adapters(self, b: Builder, number: int) -> AdapterOperands:
        """Return what adapters of rows read, in the buffers from that number on."""
        is_head = self.dim == "logit_rows"
        adapters, *gathered, table, short = (b.buffer(number + i) for i in range(3 + is_head))
        return AdapterOperands(RowAdapters(adapters, *gathered), table, short, self.adapter_tiles)

    @property
    def _blocks(self) -> int:
        """Number of blocks of 32 columns."""
        return round_up(self.n, BLOCK) // BLOCK

    def _block_bytes(self, dtypes: Dtypes) -> int:
        """Return the bytes of the packed weights of a block of columns."""
        if self.quantized is not None:
            return self.quantized.block_bytes(self.k)
        return round_up(self.k, BLOCK) // BLOCK * dtypes.block_bytes

    def _multiply(self, b: Builder, context: EmitContext, x: Value, w: Value, item: GemmItem, sink: ColumnSink) -> None:
        """Call `sink` with each row of the item's products."""
        dtypes = context.dtypes
        if self.quantized is not None:
            panels = b.address(x, item.panel * self.quantized.panel_bytes(self.k))
            products, size = context.quantized_products(self.quantized, self.k), self._block_bytes(dtypes)

            def addresses(block: Value) -> Value:
                return b.address(w, block * size)

            products.emit_item(b, panels, item.rows, item.block, item.blocks, addresses, sink, item.items)
            return
        blocks = round_up(self.k, BLOCK) // BLOCK
        row_bytes = BLOCK * dtypes.activation_bytes
        panel_bytes = blocks * TILE_ROWS * row_bytes
        operand = Panels(b.address(x, item.panel * panel_bytes), row_bytes, TILE_ROWS * row_bytes, panel_bytes)

        def columns(block: Value) -> PackedColumns:
            return context.products.streamed(b, blocks, b.address(w, block * self._block_bytes(dtypes)), item.rows)

        context.products.emit_item(b, operand, item.rows, item.block, item.blocks, columns, sink)

    def _sink(self, b: Builder, context: EmitContext, output: GemmOutput, first: Value) -> ColumnSink:
        """Return what takes the products of rows from number `first` on, and stores what adapters and the epilogue
        make of them."""
        plain = self._plain_sink(b, context, output, first)
        return plain if output.adapters is None else AdaptingSink(b, context, output.adapters, first, plain)

    def _plain_sink(self, b: Builder, context: EmitContext, output: GemmOutput, first: Value) -> ColumnSink:
        """Return what takes products that adapters have changed already."""

        def finish(block: Value, row: Value, values: Sequence[Value]) -> None:
            self._finish(b, context.dtypes, output, first + row, block, values)

        return ColumnSink(finish)

    def _finish(
        self, b: Builder, dtypes: Dtypes, output: GemmOutput, row: Value, block: Value, values: Sequence[Value]
    ) -> None:
        """Store a row of products with block `block` of as many columns as there are values, changed by its adapter,
        after the epilogue."""
        size = len(values) * LINE
        if output.bias is not None:
            bias = output.bias if output.adapters is None else output.adapters.biases(b, row, output.bias)
            values = [v + b.load(bias, block * size + 64 * i, VF32, 64) for i, v in enumerate(values)]
        if self.softcap:
            values = [softcap(b, v, self.softcap, self.scale) for v in values]
        elif self.scale != 1:
            values = [v * self.scale for v in values]
        if self.epilogue in ("store", "add"):
            columns = round_up(self.y_columns or self.n, BLOCK)
            at = b.address(output.y, (row * columns + self.first) * 4 + block * size)
            for i, value in enumerate(values):
                total = value + b.load(at, 64 * i, VF32, 64) if self.epilogue == "add" else value
                if output.mask is not None:
                    is_stored = b.compare("ne", b.load(output.mask, 64 * i, VI32, 64), 0)
                    total = b.select(is_stored, total, b.load(at, 64 * i, VF32, 64))
                b.store(total, at, 64 * i, 64)
            return
        if output.factors is not None:
            at = b.address(output.factors, row * (round_up(self.y_columns or self.n, BLOCK) * 4) + block * size)
            pairs = [(b.load(at, 64 * i, VF32, 64), value) for i, value in enumerate(values)]
            results = [self._gated(b, *(pair if self.epilogue == "gated" else pair[::-1])) for pair in pairs]
        else:
            results = self._activated(b, output, values)
        width = round_up(self.n, BLOCK) * len(results) // len(values)
        for i, value in enumerate(results):
            column = block * (16 * len(results)) + 16 * i
            store_activation(b, dtypes, value, output.y, packed_offset(dtypes, width, row, column))

    def _activated(self, b: Builder, output: GemmOutput, values: Sequence[Value]) -> list[Value]:
        """Return the activations of two tiles of columns: one tile if they are gates and ups."""
        if self.epilogue == "gate":
            return [self._gated(b, *values)]
        if output.parameters is not None:
            return [xielu(b, output.parameters, value) for value in values]
        assert not isinstance(self.activation, ClampedSwiglu)
        return [activation(b, self.activation, value) for value in values]

    def _gated(self, b: Builder, gate: Value, up: Value) -> Value:
        if isinstance(self.activation, ClampedSwiglu):
            return clamped_swiglu(b, self.activation, gate, up)
        return activation(b, self.activation, gate) * up
