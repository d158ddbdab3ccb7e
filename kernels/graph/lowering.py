"""Lowering of a graph to a plan: decides fusion, number formats and kernels.

Linear layers that share their input become one GEMM: their outputs one after the other, or gate and up interleaved.
Activations, residual additions, scales and softcaps run in a GEMM's epilogue; a norm quantizes its output if the next
layer is quantized. Hidden states stay in f32; inputs of products are packed activations (emit/layout.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from quire.kernels._native import MAX_KV_SPLITS
from quire.kernels.emit.attention import (
    BLOCK_TOKENS,
    AttentionKernel,
    SplitReductionKernel,
    split_bytes,
    tokens_per_entry,
)
from quire.kernels.emit.gemm import GemmKernel
from quire.kernels.emit.kv import KV_TILE, SplitHeadsKernel
from quire.kernels.emit.layout import BLOCK, TILE_ROWS, Dtypes, QuantizedFormat, round_up
from quire.kernels.emit.products import rows_of_block
from quire.kernels.emit.rows import EmbeddingKernel, NormKernel, QuantizeKernel
from quire.kernels.errors import ModelError
from quire.kernels.graph.operations import (
    Attention,
    Embedding,
    FeedForward,
    Graph,
    Linear,
    Logits,
    Norm,
    Parallel,
    Residual,
)
from quire.kernels.operands import (
    Buffer,
    KvLayer,
    Launch,
    Matrix,
    MatrixPart,
    Operand,
    PackedActivations,
    PlanLimits,
    RopeTable,
    Table,
    TensorRows,
    Vector,
)
from quire.kernels.plan import ModelPlan
from quire.kernels.weights.quantization import Quantization

MAX_QUANTIZED_INPUTS = 65536
"""Most inputs of a quantized layer: more could overflow its sums."""


@dataclass(frozen=True)
class FusedLinear:
    """Linear layers that share their input, as one GEMM. `head`: it computes the logits."""

    layers: tuple[Linear, ...]
    interleaved: bool = False
    head: bool = False

    @property
    def dim(self) -> str:
        """Dim that counts the rows of the input."""
        return "logit_rows" if self.head else "tokens"


def lower(graph: Graph, dtypes: Dtypes, limits: PlanLimits, quantization: Quantization) -> ModelPlan:
    """Return the plan of a model. Raises ModelError for an operation that no kernel can compute."""
    return Lowering(graph, dtypes, limits, quantization).lower()


class Lowering:
    """State of a lowering; other modules of this package lower their operations with its public methods."""

    def __init__(self, graph: Graph, dtypes: Dtypes, limits: PlanLimits, quantization: Quantization) -> None:
        self._graph = graph
        self.quantization = quantization
        attentions = graph.attentions
        _check(graph, attentions)
        self.plan = ModelPlan(
            dtypes, limits, quantization, graph.embedding.vocab_size, graph.embedding.hidden_size, attentions[0].heads,
            len(attentions), min(tokens_per_entry(attention.heads.group) for attention in attentions),
            graph.is_encoder, max(1, graph.embedding.num_types),
        )  # fmt: skip
        self.next_layer = 0

    def lower(self) -> ModelPlan:
        """Return the plan."""
        logits = self._graph.logits
        head = FusedLinear((logits.linear,), head=True) if isinstance(logits, Logits) else None
        hidden = self._embedding(self._graph.embedding, head)
        for residual in self._graph.residuals:
            self._residual(hidden, residual)
        self._hidden_states(hidden, logits.norm)
        if isinstance(logits, Logits) and head is not None:
            self._logits(hidden, logits, head)
        return self.plan

    # Buffers

    def rows(self, name: str, columns: int) -> Buffer:
        """Return a buffer of f32 rows."""
        return self.plan.buffer(name, self.plan.limits.max_num_batched_tokens * round_up(columns, BLOCK) * 4)

    def activations(self, name: str, columns: int, quantized: QuantizedFormat | None = None) -> PackedActivations:
        """Return a buffer of packed activations, quantized for weights of the format `quantized`."""
        panels = -(-self.plan.limits.max_num_batched_tokens // TILE_ROWS)
        if quantized is not None:
            # One buffer for each width and grouping: its padding is never written and stays zero.
            name, size = f"quantized_{columns}_{quantized.activation_group}", panels * quantized.panel_bytes(columns)
        else:
            size = panels * TILE_ROWS * round_up(columns, BLOCK) * self.plan.dtypes.activation_bytes
        return PackedActivations(self.plan.buffer(name, size), columns, quantized)

    # Embedding, norms, logits

    def _embedding(self, operation: Embedding, head: FusedLinear | None) -> Buffer:
        """Lower the embedding. If the head has the same tensor, it is packed once for both."""
        out, width = self.rows("hidden", operation.hidden_size), operation.hidden_size
        if head is not None and head.layers[0].weight == operation.weight:
            quantized = self.format_of(head)
        else:
            quantized = self.quantization.format_of_embedding(operation.weight)
        matrix = Matrix(
            (MatrixPart(operation.weight, operation.vocab_size, width),), operation.vocab_size, width, quantized
        )
        operands: list[Operand] = [Buffer("token_ids", input=True), matrix, out]
        if operation.types:
            operands += [Buffer("token_types", input=True), TensorRows(operation.types, operation.num_types, width)]
        if operation.positions:
            table = TensorRows(operation.positions, operation.num_positions, width, operation.first_position)
            operands += [Buffer("positions", input=True), table]
        kernel = EmbeddingKernel(
            "embed", width, bool(operation.positions), quantized, operation.scale, operation.num_types
        )
        self.plan.add(kernel, operands, "tokens")
        self._norm_around(out, operation.norm)
        return out

    def _norm_around(self, hidden: Buffer, norm: Norm | None) -> None:
        """Lower a norm of the hidden states that takes their place."""
        if norm is not None:
            kernel, operands = norm_kernel("norm_around", norm, self.plan.hidden_size, hidden, hidden)
            self.plan.add(replace(kernel, output="hidden"), operands, "tokens")

    def _hidden_states(self, hidden: Buffer, norm: Norm | None) -> None:
        """Lower the final norm for the rows that are pooled, as f32."""
        states = Buffer("hidden_states", input=True)
        kernel, operands = norm_kernel("norm_states", norm, self.plan.hidden_size, hidden, states)
        operands.append(Buffer("logit_rows", input=True))
        gathering = self.plan.kernel(replace(kernel, gather=True, output="rows"))
        self.plan.hidden_states.append(Launch(gathering, tuple(operands), "logit_rows"))

    def norm(self, hidden: Buffer, norm: Norm | None, *consumers: FusedLinear) -> PackedActivations:
        """Lower a norm of the hidden states, in the format that its consumers read, if it is the same.

        A norm of the head gathers the rows whose logits are needed.
        """
        width, dim = self.plan.hidden_size, consumers[0].dim
        out = self.activations("normed", width, self._common_format(consumers, width))
        kernel, operands = norm_kernel("norm", norm, width, hidden, out.buffer)
        kernel = replace(kernel, gather=consumers[0].head, quantized=out.quantized)
        if consumers[0].head:
            operands.append(Buffer("logit_rows", input=True))
        self.plan.add(kernel, operands, dim)
        return out

    def _common_format(self, consumers: Sequence[FusedLinear], width: int) -> QuantizedFormat | None:
        """Return a format whose activations all consumers read, in order; None if there is none."""
        formats = [self.format_of(linear) for linear in consumers]
        if any(self.quantization.order_of(linear.layers, width) is not None for linear in consumers):
            return None
        groups = {None if form is None else form.activation_group for form in formats}
        return formats[0] if len(groups) == 1 else None

    def _logits(self, hidden: Buffer, operation: Logits, head: FusedLinear) -> None:
        x = self.norm(hidden, operation.norm, head)
        self.gemm("logits", x, head, Buffer("logits", input=True), scale=operation.scale, softcap=operation.softcap)

    # Linear layers

    def format_of(self, linear: FusedLinear) -> QuantizedFormat | None:
        """Return the format of a fused linear layer's weights, None if they are not quantized."""
        return self.quantization.format_of(linear.layers, linear.head)

    def runs(self, linear: FusedLinear) -> list[FusedLinear]:
        """Divide layers that share their input where the format of their weights changes."""
        formats = [self.quantization.format_of((layer,), linear.head) for layer in linear.layers]
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

    def quantized(self, x: PackedActivations, linear: FusedLinear) -> PackedActivations:
        """Convert x to the format that the linear layer reads."""
        quantized = self.format_of(linear)
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
        quantized = self.format_of(linear)
        if quantized is not None and k > MAX_QUANTIZED_INPUTS:
            raise ModelError(
                f"{linear.layers[0].weight} has {k} inputs; quantized layers may have up to {MAX_QUANTIZED_INPUTS}"
            )
        step = len(sizes) if linear.interleaved else 1
        parts, tile, columns = [], 0, 0
        for layer in linear.layers:
            part = MatrixPart(layer.weight, layer.outputs, k, layer.transposed, tile, step)
            parts.append(replace(part, first=layer.first, tensor_n=layer.tensor_outputs))
            tile += 1 if linear.interleaved else -(-layer.outputs // TILE_ROWS)
            columns += round_up(layer.outputs, TILE_ROWS) if linear.interleaved else layer.outputs
        return Matrix(tuple(parts), columns, k, quantized)

    def gemm(
        self, name: str, x: PackedActivations, linear: FusedLinear, out: Buffer, *,
        epilogue: str = "store", activation: str = "", scale: float = 1.0, softcap: float = 0.0,
        out_columns: int = 0, first: int = 0,
    ) -> None:  # fmt: skip
        """Lower a linear layer whose results go to `out`, by an epilogue of GemmKernel.

        They are the columns from `first` on of `out_columns` columns, if that is given.
        """
        x = self.quantized(x, linear)
        matrix, layers = self.matrix(linear, x.columns), linear.layers
        operands: list[Operand] = [x.buffer, matrix, out]
        if layers[0].bias:
            if any(layer.tensor_outputs for layer in layers):
                raise ModelError(f"{layers[0].weight} is split into layers with biases, which is not supported")
            names, sizes = tuple(layer.bias for layer in layers), tuple(layer.outputs for layer in layers)
            operands.append(Vector(names, sizes, linear.interleaved))
        kernel = GemmKernel(
            name, matrix.k, matrix.n, epilogue, bool(layers[0].bias), activation, linear.dim, matrix.quantized, scale,
            softcap, out_columns, first,
        )  # fmt: skip
        repeats = round_up(matrix.n, BLOCK) // BLOCK
        rows_per_item = rows_of_block(self.plan.dtypes)
        self.plan.add(kernel, operands, linear.dim, rows_per_item=rows_per_item, repeats=repeats)

    # Residual blocks

    def _residual(self, hidden: Buffer, residual: Residual) -> None:
        """Lower a residual block: its last linear layers add to the hidden states, or a norm after them does.

        Layers side by side read the hidden states before either adds to them.
        """
        block = residual.block
        layers = (block.attention, block.feed_forward) if isinstance(block, Parallel) else (block,)
        last = [self._layer(hidden, residual.before, layer) for layer in layers]
        if residual.after is None:
            for x, linear in last:
                self.gemm("linear_add", x, linear, hidden, epilogue="add", scale=residual.multiplier)
            self._norm_around(hidden, residual.around)
            return
        out = self.rows("block_output", self.plan.hidden_size)
        for number, (x, linear) in enumerate(last):
            self.gemm("linear_add" if number else "linear", x, linear, out, epilogue="add" if number else "store")
        kernel, operands = norm_kernel("norm_add", residual.after, self.plan.hidden_size, out, hidden)
        self.plan.add(replace(kernel, output="residual", scale=residual.multiplier), operands, "tokens")
        self._norm_around(hidden, residual.around)

    def _layer(
        self, hidden: Buffer, before: Norm | None, layer: Attention | FeedForward
    ) -> tuple[PackedActivations, FusedLinear]:
        """Lower a layer up to its last linear layer, which is returned with its input."""
        if isinstance(layer, Attention):
            return self._attention(hidden, before, layer), FusedLinear((layer.output,))
        return self._feed_forward(hidden, before, layer), FusedLinear((layer.down,))

    def _feed_forward(self, hidden: Buffer, before: Norm | None, operation: FeedForward) -> PackedActivations:
        if operation.gate is None:
            widen, name, epilogue = FusedLinear((operation.up,)), "linear_act", "activation"
        else:
            widen, name, epilogue = FusedLinear((operation.gate, operation.up), interleaved=True), "linear_gate", "gate"
        x = self.norm(hidden, before, widen)
        out = self.activations("intermediate", operation.up.outputs)
        self.gemm(name, x, widen, out.buffer, epilogue=epilogue, activation=operation.activation)
        return out

    def _attention(self, hidden: Buffer, before: Norm | None, operation: Attention) -> PackedActivations:
        """Lower attention up to its output layer: writes this step's K and V to their pages first."""
        width = sum(layer.outputs for layer in operation.projections)
        qkv, first = self.rows("qkv", width), 0
        runs = self.runs(FusedLinear(operation.projections))
        x = self.norm(hidden, before, *runs)
        for run in runs:
            self.gemm("linear", x, run, qkv, out_columns=width if len(runs) > 1 else 0, first=first)
            first += sum(layer.outputs for layer in run.layers)
        plan, heads, layer = self.plan, operation.heads, KvLayer(self.next_layer)
        self.next_layer += 1
        query_rows = plan.limits.max_num_batched_tokens * heads.query + TILE_ROWS  # AMX reads whole tiles of rows
        queries = plan.buffer("queries", query_rows * plan.kv_layout.query_bytes)
        self._split_heads(qkv, operation, queries, layer)
        out = self.activations("attended", heads.query * heads.dim)
        kernel = AttentionKernel(
            "attention", heads, operation.scale or 1.0 / math.sqrt(heads.dim), plan.limits.block_size // KV_TILE,
            operation.window if operation.window < plan.limits.max_model_len else 0, operation.softcap,
            bool(operation.sinks), bidirectional=operation.bidirectional,
        )  # fmt: skip
        sinks = [Vector((operation.sinks,), (heads.query,))] if operation.sinks else []
        entries = [Buffer("entries", input=True), queries, layer, out.buffer, *sinks]
        plan.add(kernel, entries, "entries", repeats=heads.kv)
        if plan.limits.max_model_len > BLOCK_TOKENS and not operation.bidirectional:
            splits = plan.buffer("partials", MAX_KV_SPLITS * heads.query * split_bytes(heads))
            kernel = replace(kernel, name="attention_split", sinks=False, kv_split=True)
            plan.add(kernel, [Buffer("kv_splits", input=True), queries, layer, splits], "kv_splits", repeats=heads.kv)
            reduction = SplitReductionKernel("split_reduction", heads, kernel.window, bool(sinks))
            reductions = [Buffer("reductions", input=True), splits, out.buffer, *sinks]
            plan.add(reduction, reductions, "reductions", repeats=heads.kv)
        return out

    def _split_heads(self, qkv: Buffer, operation: Attention, queries: Buffer, layer: KvLayer) -> None:
        heads, rotary, norms = operation.heads, operation.rotary, operation.head_norms
        operands: list[Operand] = [
            qkv, Buffer("positions", input=True), Buffer("kv_slots", input=True), queries, layer,
        ]  # fmt: skip
        if rotary is not None:
            rotary.check()
            operands.append(RopeTable(rotary, self.plan.limits.max_model_len))
        if norms is not None:
            sizes = (heads.query * heads.dim, heads.kv * heads.dim) if norms.joint else (heads.dim, heads.dim)
            for name, size in zip((norms.query, norms.key), sizes, strict=True):
                operands.append(Vector((name,), (size,), offset=norms.weight_offset))
        kernel = SplitHeadsKernel("split_heads", heads)
        if rotary is not None:
            kernel = replace(kernel, rotary=rotary.dim, interleaved=rotary.interleaved)
        if norms is not None:
            kernel = replace(kernel, norm="joint" if norms.joint else "head", epsilon=norms.epsilon)
        self.plan.add(kernel, operands, "tokens", repeats=heads.kv)


def norm_kernel(
    name: str, norm: Norm | None, width: int, source: Buffer, out: Buffer
) -> tuple[NormKernel, list[Operand]]:
    """Return the kernel of a norm, or of a conversion without a norm, and its operands."""
    if norm is None:
        return NormKernel(name, width, 0.0, "none"), [source, out]
    kind: Literal["rms", "layer"] = "layer" if norm.center else "rms"
    operands: list[Operand] = [source, Vector((norm.weight,), (width,), offset=norm.weight_offset), out]
    if norm.bias:
        operands.append(Vector((norm.bias,), (width,)))
    return NormKernel(name, width, norm.epsilon, kind, bool(norm.bias)), operands


def _check(graph: Graph, attentions: list[Attention]) -> None:
    """Raise ModelError for sizes that no kernel can compute."""
    hidden_size = graph.embedding.hidden_size
    if hidden_size % 16:
        raise ModelError(f"hidden_size is {hidden_size}; it must be a multiple of 16")
    if not attentions:
        raise ModelError("the model's graph has no attention; models without KV pages are not supported")
    first = attentions[0].heads
    for number, attention in enumerate(attentions):
        heads, rotary = attention.heads, attention.rotary
        if heads.dim % 16 or heads.query % heads.kv:
            raise ModelError(
                f"config.json: num_attention_heads ({heads.query}) must be a multiple of num_key_value_heads "
                f"({heads.kv}), and head_dim ({heads.dim}) a multiple of 16"
            )
        if (heads.kv, heads.dim) != (first.kv, first.dim):
            raise ModelError(
                f"attention of layer {number} has {heads.kv} KV heads of {heads.dim} elements, but that of layer 0 has "
                f"{first.kv} of {first.dim}; KV pages have the same layout in every layer"
            )
        outputs = sum(layer.outputs for layer in attention.projections)
        needed = (heads.query + 2 * heads.kv) * heads.dim
        if outputs != needed:
            raise ModelError(f"attention of layer {number} has {outputs} projection outputs; its heads need {needed}")
        if rotary is not None and (rotary.dim % 16 or rotary.dim > heads.dim):
            raise ModelError(
                f"attention of layer {number} rotates {rotary.dim} of {heads.dim} elements of a head; supported are "
                f"multiples of 16 up to {heads.dim}"
            )
