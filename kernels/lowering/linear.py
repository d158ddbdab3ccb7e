"""Lowering of linear layers, their inputs, and the norms before them: what the lowerings of all operations share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from quire.kernels.activations import ClampedSwiglu, FixedActivation, Xielu
from quire.kernels.adapted import AdaptedColumns, AdaptedProduct, most_ranks
from quire.kernels.emit.adapters import ENTRY_BYTES, rows_at_once
from quire.kernels.emit.gates import CutoffKernel
from quire.kernels.emit.gemm import XIELU, GemmKernel
from quire.kernels.emit.layout import BLOCK, TILE_ROWS, QuantizedFormat, round_up
from quire.kernels.emit.own_columns import OWN_COLUMNS_BYTES, HeadKernel
from quire.kernels.emit.rows import QuantizeKernel
from quire.kernels.emit.shrink import SHRUNK_ROWS, ShrinkKernel
from quire.kernels.errors import ModelError
from quire.kernels.graph.operations import FeedForward, Norm
from quire.kernels.lowering.fused import FusedLinear, norm_kernel, widening_of
from quire.kernels.operands import (
    Buffer,
    Matrix,
    MatrixPart,
    Operand,
    PackedActivations,
    Table,
    XieluParameters,
)
from quire.kernels.plan import ModelPlan
from quire.kernels.weights.quantization import Quantization

MAX_QUANTIZED_INPUTS = 65536
"""Most inputs of a quantized layer: more could overflow its sums."""


@dataclass(frozen=True)
class Epilogue:
    """Epilogue of a product, with the fields of GemmKernel; the kinds `gated` and `gating` read the rows `factors`, and
    xIELU its `parameters`."""

    kind: str = "store"
    activation: FixedActivation = ""
    scale: float = 1.0
    softcap: float = 0.0
    out_columns: int = 0
    first: int = 0
    factors: Buffer | None = None
    parameters: XieluParameters | None = None


_STORE = Epilogue()


class LinearLowering:
    """Appends launches to a plan."""

    def __init__(self, plan: ModelPlan, quantization: Quantization) -> None:
        self.plan = plan
        self.quantization = quantization

    # Buffers

    def rows(self, name: str, columns: int, *, count: int | None = None) -> Buffer:
        """Return a buffer of f32 rows, as many as a step's tokens, or `count`."""
        return self.plan.buffer(name, (count or self.plan.limits.max_num_batched_tokens) * round_up(columns, BLOCK) * 4)

    def activations(
        self, name: str, columns: int, quantized: QuantizedFormat | None = None, *, rows: int | None = None
    ) -> PackedActivations:
        """Return a buffer of packed activations of a step's tokens, or of `rows` rows, for weights of a format."""
        panels = -(-(rows or self.plan.limits.max_num_batched_tokens) // TILE_ROWS)
        if quantized is not None:
            # One buffer for each width and grouping: its padding is never written and stays zero.
            prefix, kind = "quantized" if rows is None else name, "rotated_" if quantized.rotated else ""
            name = f"{prefix}_{columns}_{kind}{quantized.activation_group}"
            size = panels * quantized.panel_bytes(columns)
        else:
            size = panels * TILE_ROWS * round_up(columns, BLOCK) * self.plan.dtypes.activation_bytes
        return PackedActivations(self.plan.buffer(name, size), columns, quantized)

    def norm(
        self, hidden: Buffer, norm: Norm | None, *consumers: FusedLinear, width: int | None = None,
        name: str = "normed", row_columns: int = 0,
    ) -> PackedActivations:  # fmt: skip
        """Lower a norm of rows as wide as the hidden states, or `width`, in the format that its consumers read.

        If that is not the same for all, they convert it. A norm of the head gathers the rows whose logits are needed.
        Where rows may have adapters, these read floats. Rows of `hidden` have `row_columns` columns, by default as many
        as the norm.
        """
        width, dim = width or self.plan.hidden_size, consumers[0].dim
        out = self.activations(name, width, self._common_format(consumers, width))
        kernel, operands = norm_kernel("norm", norm, width, hidden, out.buffer)
        kernel = replace(kernel, gather=consumers[0].head, quantized=out.quantized, row_columns=row_columns)
        if consumers[0].head:
            operands.append(Buffer("logit_rows", input=True))
        if out.quantized is not None and self.plan.limits.max_loras:
            floats = self.activations(f"{name}_floats", width).buffer
            kernel, operands = replace(kernel, with_floats=True), [*operands, floats]
            out = replace(out, unquantized=floats)
        self.plan.add(kernel, operands, dim)
        return out

    def _common_format(self, consumers: Sequence[FusedLinear], width: int) -> QuantizedFormat | None:
        """Return a format whose activations all consumers read, in order; None if there is none."""
        formats = [self.format_of(linear, width) for linear in consumers]
        if any(self.quantization.order_of(linear.layers, width) is not None for linear in consumers):
            return None
        groups = {None if form is None else (form.activation_group, form.rotated) for form in formats}
        return formats[0] if len(groups) == 1 else None

    # Linear layers

    def format_of(self, linear: FusedLinear, k: int) -> QuantizedFormat | None:
        """Return the format of a fused linear layer's weights [n, k], None if they are not quantized."""
        return self.quantization.format_of(linear.layers, k, linear.place)

    def runs(self, linear: FusedLinear, k: int) -> list[FusedLinear]:
        """Divide layers that share their k inputs where the format of their weights changes."""
        formats = [self.quantization.format_of((layer,), k, linear.place) for layer in linear.layers]
        changes = [i for i in range(1, len(formats)) if formats[i] != formats[i - 1]]
        for layer in (linear.layers[i - 1] for i in changes):
            if layer.outputs % BLOCK:
                raise ModelError(
                    f"{layer.weight} has {layer.outputs} outputs; before a layer of another type there must be a "
                    f"multiple of {BLOCK}"
                )
        return [
            replace(linear, layers=linear.layers[start:stop])
            for start, stop in zip([0, *changes], [*changes, len(formats)], strict=True)
        ]

    def project(
        self, name: str, hidden: Buffer, norm: Norm | None, linear: FusedLinear, *, add: bool = False
    ) -> Buffer:
        """Lower layers after a norm, one after the other in f32 rows `name`, whatever formats they have.

        `add`: to what is there.
        """
        runs = self.runs(linear, self.plan.hidden_size)
        return self.multiply(name, self.norm(hidden, norm, *runs), runs, linear.outputs, add=add)

    def multiply(
        self, name: str, x: PackedActivations, runs: Sequence[FusedLinear], columns: int, *, add: bool = False
    ) -> Buffer:
        """Lower runs of layers to f32 rows `name` of so many columns in all. `add`: to what is there."""
        out, first = self.rows(name, columns), 0
        kernel, kind = ("linear_add", "add") if add else ("linear", "store")
        for run in runs:
            epilogue = Epilogue(kind, out_columns=columns if len(runs) > 1 else 0, first=first)
            self.gemm(kernel, x, run, out, epilogue)
            first += run.outputs
        return out

    def quantized(self, x: PackedActivations, linear: FusedLinear) -> PackedActivations:
        """Convert x to the format that the linear layer reads."""
        quantized = self.format_of(linear, x.columns)
        if quantized is None or x.quantized is not None:
            return x
        out = self.activations("", x.columns, quantized)
        operands: list[Operand] = [x.buffer, out.buffer]
        order = self.quantization.order_of(linear.layers, x.columns)
        if order is not None:
            operands.append(Table("order", order))
        kernel = QuantizeKernel("quantize", x.columns, quantized, gather=order is not None)
        self.plan.add(kernel, operands, linear.dim)
        return out

    def matrix(self, linear: FusedLinear, k: int) -> Matrix:
        """Return the packed tensors of the layers, one after the other or 16 columns of each in turn."""
        sizes = [layer.outputs for layer in linear.layers]
        if not linear.interleaved and any(size % TILE_ROWS for size in sizes[:-1]):
            raise ModelError(f"linear layers with {sizes} outputs share their input; they must be multiples of 16")
        quantized = self.format_of(linear, k)
        if quantized is not None and k > MAX_QUANTIZED_INPUTS:
            raise ModelError(
                f"{linear.layers[0].weight} has {k} inputs; quantized layers may have up to {MAX_QUANTIZED_INPUTS}"
            )
        step = len(sizes) if linear.interleaved else 1
        parts, tile, columns = [], 0, 0
        for layer in linear.layers:
            part = MatrixPart(layer.weight, layer.outputs, k, layer.transposed, tile, step)
            part = replace(part, first=layer.first, tensor_n=layer.tensor_outputs)
            parts.append(replace(part, first_k=layer.first_input, tensor_k=layer.tensor_inputs))
            tile += 1 if linear.interleaved else -(-layer.outputs // TILE_ROWS)
            columns += round_up(layer.outputs, TILE_ROWS) if linear.interleaved else layer.outputs
        return Matrix(tuple(parts), columns, k, quantized)

    def gemm(
        self, name: str, x: PackedActivations, linear: FusedLinear, out: Buffer, epilogue: Epilogue = _STORE
    ) -> AdaptedProduct | None:
        """Lower a linear layer whose results go to `out`; return it if adapters may change it."""
        matrix, layers = self.matrix(linear, x.columns), linear.layers
        adapters = self._shrink(x, linear, matrix)
        x = self.quantized(x, linear)
        operands: list[Operand] = [x.buffer, matrix, out]
        if layers[0].bias:
            if any(layer.tensor_outputs for layer in layers):
                raise ModelError(f"{layers[0].weight} is split into layers with biases, which is not supported")
            operands.append(linear.biases)
        if epilogue.factors is not None:
            operands.append(epilogue.factors)
        if epilogue.parameters is not None:
            operands.append(epilogue.parameters)
        own_columns = None if adapters is None else adapters.own_columns
        if adapters is not None:
            operands += [*row_adapters(linear), adapters.table, adapters.short]
        if own_columns is not None:
            operands.append(own_columns)
        kernel = (GemmKernel if own_columns is None else HeadKernel)(
            name, matrix.k, matrix.n, epilogue.kind, bool(layers[0].bias), epilogue.activation, linear.dim,
            matrix.quantized, epilogue.scale, epilogue.softcap, epilogue.out_columns, epilogue.first,
            0 if adapters is None else adapters.tiles,
        )  # fmt: skip
        repeats = round_up(matrix.n, BLOCK) // BLOCK
        rows_per_item = self.plan.context.rows_per_item
        self.plan.add(kernel, operands, linear.dim, rows_per_item=rows_per_item, repeats=repeats)
        return adapters

    def _shrink(self, x: PackedActivations, linear: FusedLinear, matrix: Matrix) -> AdaptedProduct | None:
        """Lower the first half of what adapters change of layers, if they may; return what the product reads then."""
        limits = self.plan.limits
        if not limits.max_loras:
            return None
        tiles = -(-linear.num_tensors * most_ranks(limits.max_lora_rank) // TILE_ROWS)
        short = self.plan.buffer("adapter_ranks", limits.max_num_batched_tokens * tiles * TILE_ROWS * 4)
        columns = self._own_columns(linear, matrix) if linear.head else None
        table, biases = self.plan.adapter_table(ENTRY_BYTES), linear.biases if linear.layers[0].bias else None
        product = AdaptedProduct(table, short, matrix, tiles, biases, columns)
        self.plan.adapted.append(product)
        rows = rows_at_once(self.plan.context.isa, SHRUNK_ROWS)
        kernel = ShrinkKernel("adapter_shrink", x.columns, tiles, linear.head, rows)
        operands = [x.floats, *row_adapters(linear), table, short]
        self.plan.add(kernel, operands, linear.dim, rows_per_item=rows, repeats=tiles)
        return product

    def _own_columns(self, head: FusedLinear, matrix: Matrix) -> Buffer:
        """Return the table of columns that adapters have of the head."""
        table = self.plan.adapter_table(OWN_COLUMNS_BYTES)
        self.plan.adapted.append(AdaptedColumns(table, head.layers[0].weight, matrix.n, matrix.k))
        return table

    def widen(self, x: PackedActivations, operation: FeedForward) -> PackedActivations:
        """Lower a feed-forward layer but for its last linear layer, whose input is returned.

        Gate and up are computed side by side, unless their weights have different formats.
        """
        if operation.cutoff is not None:
            return self._cut_off(x, operation, operation.cutoff)
        gated = operation.gate is not None
        if not gated and isinstance(operation.activation, ClampedSwiglu):
            raise ModelError(f"{operation.up.weight} has no gate, which a clamped SwiGLU needs")
        out, act = self.intermediate(operation.up.outputs), operation.activation
        if isinstance(act, Xielu):
            if gated:
                raise ModelError(f"{operation.up.weight} has a gate, which xIELU does not support")
            epilogue = Epilogue("activation", XIELU, parameters=XieluParameters(act))
            self.gemm("linear_act", x, widening_of(operation), out.buffer, epilogue)
            return out
        name, kind = ("linear_gate", "gate") if gated else ("linear_act", "activation")
        first, *second = self.runs(widening_of(operation), x.columns)
        if not second:
            self.gemm(name, x, first, out.buffer, Epilogue(kind, act))
            return out
        gates = self.rows("feed_forward_gates", operation.up.outputs)
        self.gemm("linear", x, first, gates)
        self.gemm("linear_gated", x, second[0], out.buffer, Epilogue("gated", act, factors=gates))
        return out

    def _cut_off(self, x: PackedActivations, operation: FeedForward, cutoff: float) -> PackedActivations:
        """Lower a feed-forward layer whose small gates become 0: all of a token's gates are needed for any of them."""
        up, gate, act = operation.up, operation.gate, operation.activation
        if gate is None or isinstance(act, ClampedSwiglu | Xielu):
            raise ModelError(f"{up.weight} has a cutoff, which needs a gate and a plain activation")
        if up.outputs % TILE_ROWS:
            raise ModelError(
                f"{up.weight} has {up.outputs} outputs; with a cutoff it must be a multiple of {TILE_ROWS}"
            )
        gates, out = self.rows("feed_forward_gates", gate.outputs), self.intermediate(up.outputs)
        self.gemm("linear", x, FusedLinear((gate,)), gates)
        self.plan.add(CutoffKernel("cutoff", gate.outputs, cutoff), [gates], "tokens")
        self.gemm("linear_gated", x, FusedLinear((up,)), out.buffer, Epilogue("gated", act, factors=gates))
        return out

    def intermediate(self, columns: int) -> PackedActivations:
        """Return a buffer of what the last layer of a feed-forward layer reads; its padding is never written."""
        return self.activations("intermediate" if columns % BLOCK == 0 else f"intermediate_{columns}", columns)


def row_adapters(linear: FusedLinear) -> list[Operand]:
    """Return the operands that tell which adapters the rows of a product have."""
    gathered = [Buffer("logit_rows", input=True)] if linear.head else []
    return [Buffer("row_adapters", input=True), *gathered]
