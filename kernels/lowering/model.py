"""Lowering of a graph to a plan: decides fusion, number formats and kernels.

Linear layers that share their input become one GEMM: their outputs one after the other, or gate and up interleaved.
Activations, residual additions, scales and softcaps run in a GEMM's epilogue; a norm quantizes its output if the next
layer is quantized. Hidden states stay in f32; inputs of products are packed activations (emit/layout.py).
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

from quire.kernels.adapted import AdaptedEmbedding
from quire.kernels.emit.adapted_rows import EMBEDDING_ENTRY_BYTES
from quire.kernels.emit.attention import AttentionKernel
from quire.kernels.emit.context import EmitContext
from quire.kernels.emit.embedding import EmbeddingKernel
from quire.kernels.emit.gates import GateKernel
from quire.kernels.emit.kv import SplitHeadsKernel
from quire.kernels.errors import ModelError
from quire.kernels.graph.operations import (
    Attention,
    Branches,
    DeltaNet,
    DraftInput,
    Embedding,
    Experts,
    FeedForward,
    Graph,
    LatentAttention,
    Logits,
    Mixer,
    Norm,
    Parallel,
    PerLayerInput,
    Residual,
    ShortConvolution,
    StateSpace,
)
from quire.kernels.lowering.attention import AttentionLowering, check_kv_sources
from quire.kernels.lowering.experts import Sum, lower_experts
from quire.kernels.lowering.fetching import fetch_inputs
from quire.kernels.lowering.fused import FusedLinear, norm_kernel, widening_of
from quire.kernels.lowering.latent_attention import lower_latent_attention
from quire.kernels.lowering.linear import Epilogue
from quire.kernels.lowering.logits import lower_logits
from quire.kernels.lowering.per_layer_inputs import (
    add_projections,
    check_per_layer_inputs,
    lower_per_layer_input,
    per_layer_rows,
)
from quire.kernels.lowering.state import StateLowering
from quire.kernels.lowering.streams import (
    add_rows,
    check_streams,
    contract_streams,
    correct,
    expand_streams,
    lower_laurel,
    predict,
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
    QueryScales,
    RopeTable,
    TensorRows,
    Vector,
)
from quire.kernels.plan import FEATURES, FINAL, HIDDEN, LOOKAHEAD, ModelPlan, kept_name
from quire.kernels.weights.quantization import Quantization

_Layer = Mixer | FeedForward | PerLayerInput
_Block = _Layer | Experts | Parallel | Branches


def lower(graph: Graph, context: EmitContext, limits: PlanLimits, quantization: Quantization) -> ModelPlan:
    """Return the plan of a model. Raises ModelError for an operation that no kernel can compute."""
    return Lowering(graph, context, limits, quantization).lower()


class Lowering(AttentionLowering):
    """State of a lowering."""

    def __init__(self, graph: Graph, context: EmitContext, limits: PlanLimits, quantization: Quantization) -> None:
        self._graph = graph
        attentions = graph.attentions
        quantization = quantization.of_shape(graph.embedding, len(graph.mixers))
        _check(graph, attentions)
        group = max(attention.heads.group for attention in attentions)
        plan = ModelPlan(
            context, limits, quantization, graph.embedding.vocab_size, graph.embedding.hidden_size,
            tuple(attention.heads for attention in attentions if attention.kv_source is None), len(attentions),
            context.capabilities.tokens_per_entry(group), graph.is_encoder, graph.draft_input is not None,
            max(1, graph.embedding.num_types), features=graph.features, lent=frozenset(quantization.lent.values()),
        )  # fmt: skip
        super().__init__(plan, quantization, len(graph.mixers))

    def lower(self) -> ModelPlan:
        """Return the plan."""
        logits, draft_input = self._graph.logits, self._graph.draft_input
        head = FusedLinear((logits.linear,), place="head") if isinstance(logits, Logits) else None
        hidden = self.rows(HIDDEN, self.plan.hidden_size)
        if draft_input is None:
            self._embedding(self._graph.embedding, head, hidden)
        else:
            self._encode(hidden, draft_input)
            self._embedding(self._graph.embedding, head, self._embedded)
            self._draft_input(hidden, draft_input)
        if (inputs := self._graph.per_layer_inputs) is not None:
            embedding = replace(inputs.embedding, scale=inputs.embedding.scale * inputs.multiplier)
            self._embedding(embedding, None, per_layer_rows(self, inputs))
            add_projections(self, hidden, inputs)
        self._layers(hidden)
        self._keep_final(hidden, logits.norm)
        self._hidden_states(hidden, logits.norm)
        if isinstance(logits, Logits) and head is not None:
            lower_logits(self, hidden, logits, head)
        if self.plan.context.capabilities.fetches:
            fetch_inputs(self.plan)
        return self.plan

    def _layers(self, hidden: Buffer) -> None:
        """Lower all layers, and what is between them: each begins where tokens meet others."""
        streams, kept = self._graph.streams, set() if self._graph.features is None else set(self._graph.features.layers)
        if streams is not None:
            expand_streams(self, hidden, streams)
        layer = 0
        for residual in self._graph.residuals:
            if isinstance(residual.block, Mixer | Parallel):
                self._begin_layer(hidden, layer, kept)
                layer += 1
            self._residual(hidden, residual)
        self._end_layer(hidden, layer)
        self._keep(hidden, layer, kept)
        if streams is not None:
            contract_streams(self, hidden, streams)

    def _begin_layer(self, hidden: Buffer, layer: int, kept: set[int]) -> None:
        if layer:
            self._end_layer(hidden, layer)
        self._keep(hidden, layer, kept)
        if (streams := self._graph.streams) is not None:
            predict(self, hidden, streams.layers[layer][0], streams.count)

    def _end_layer(self, hidden: Buffer, stop: int) -> None:
        """Lower what is after the last of the first `stop` layers."""
        if (streams := self._graph.streams) is not None:
            correct(self, hidden, streams.layers[stop - 1][1], streams.count, self._graph.per_layer_inputs)

    # Draft heads

    @property
    def _embedded(self) -> Buffer:
        """Rows of a draft head's token embeddings."""
        return self.rows("embedded", self.plan.hidden_size)

    def _encode(self, hidden: Buffer, operation: DraftInput) -> None:
        """Lower what turns features into hidden states to launches of their own."""
        if operation.encode is None:
            return
        width, linear = operation.width * operation.features.count, FusedLinear((operation.encode,))
        features = self.rows(FEATURES, width)
        self.gemm("linear", self.norm(features, None, linear, width=width), linear, hidden)
        self.plan.encoding, self.plan.launches = self.plan.launches, []

    def _draft_input(self, hidden: Buffer, operation: DraftInput) -> None:
        if operation.combine is None:
            self._norm_around(hidden, operation.norm)
        else:
            self.project(HIDDEN, hidden, operation.norm, FusedLinear((operation.combine,)))
        if operation.embedded is not None:
            embedded = operation.embedded
            self.project(HIDDEN, self._embedded, embedded.norm, FusedLinear(embedded.layers), add=True)

    def _keep(self, hidden: Buffer, layer: int, kept: set[int]) -> None:
        """Keep the hidden states before a layer for a draft head."""
        if layer in kept:
            kernel, operands = norm_kernel("keep", None, self.plan.hidden_size, hidden, self._kept(layer))
            self.plan.add(replace(kernel, output="hidden"), operands, "kept_tokens")

    def _keep_final(self, hidden: Buffer, norm: Norm | None) -> None:
        """Keep the hidden states after the final norm for a draft head."""
        if self._graph.features is not None and self._graph.features.final:
            kernel, operands = norm_kernel("keep", norm, self.plan.hidden_size, hidden, self._kept(FINAL))
            self.plan.add(replace(kernel, output="hidden"), operands, "kept_tokens")

    def _kept(self, layer: int | str) -> Buffer:
        return self.rows(kept_name(layer), self.plan.hidden_size)

    # Embedding, norms, logits

    def _embedding(self, operation: Embedding, head: FusedLinear | None, out: Buffer) -> None:
        """Lower the embedding. If the head has the same tensor, it is packed once for both."""
        width = operation.hidden_size
        if head is not None and head.layers[0].weight == operation.weight:
            quantized = self.format_of(head, width)
        else:
            quantized = self.quantization.format_of_embedding(operation.weight, width)
        matrix = Matrix(
            (MatrixPart(operation.weight, operation.vocab_size, width),), operation.vocab_size, width, quantized
        )
        operands: list[Operand] = [Buffer("token_ids", input=True), matrix, out]
        is_adapted = self.plan.limits.max_loras > 0 and operation is self._graph.embedding
        if is_adapted:
            adapters = self.plan.adapter_table(EMBEDDING_ENTRY_BYTES)
            self.plan.adapted.append(AdaptedEmbedding(adapters, operation.weight, operation.vocab_size, width))
            operands += [Buffer("row_adapters", input=True), adapters]
        if operation.types:
            operands += [Buffer("token_types", input=True), TensorRows(operation.types, operation.num_types, width)]
        if operation.positions:
            table = TensorRows(operation.positions, operation.num_positions, width, operation.first_position)
            operands += [Buffer("positions", input=True), table]
        lookahead = self.plan.features is not None and self.plan.features.lookahead
        if lookahead:
            operands.append(self.rows(LOOKAHEAD, width, count=1))
        kernel = EmbeddingKernel(
            "embed", width, bool(operation.positions), quantized, operation.scale, operation.num_types,
            operation.vocab_size if lookahead else 0, is_adapted,
            operation.vocab_size if operation.first_for_others else 0,
        )  # fmt: skip
        self.plan.add(kernel, operands, "tokens")
        self._norm_around(out, operation.norm)

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

    # Residual blocks

    def _residual(self, hidden: Buffer, residual: Residual) -> None:
        """Lower a residual block: its last linear layers add to the hidden states, or a norm after them does.

        Layers side by side read the hidden states before either adds to them.
        """
        target, laurel = Sum(hidden, residual.multiplier), residual.laurel
        beside = None if laurel is None else lower_laurel(self, hidden, residual.before, laurel)
        if residual.after is None:
            self._block(hidden, residual.before, residual.block, target)
        else:
            self._block_and_norm(hidden, residual.before, residual.block, residual.after, target, residual.scalar)
        if beside is not None and laurel is not None:
            add_rows(self, beside, hidden, sum_scale=laurel.scale)
        self._norm_around(hidden, residual.around)

    def _block_and_norm(
        self, hidden: Buffer, before: Norm | None, block: _Block, after: Norm, target: Sum, scalar: str = ""
    ) -> None:
        """Lower a block and the norm after it; what it adds to is then multiplied by the tensor `scalar`, if named."""
        output = self.rows("branches" if isinstance(block, Branches) else "block_output", self.plan.hidden_size)
        self._block(hidden, before, block, Sum(output, add=False))
        kernel, operands = norm_kernel("norm_add", after, self.plan.hidden_size, output, target.out)
        kernel = replace(kernel, output="residual" if target.add else "hidden", scale=target.scale)
        if scalar:
            kernel, operands = replace(kernel, scalar=True), [*operands, Vector((scalar,), (1,))]
        self.plan.add(kernel, operands, "tokens")

    def _block(self, hidden: Buffer, before: Norm | None, block: _Block, target: Sum) -> None:
        if isinstance(block, Branches):
            for number, branch in enumerate(block.branches):
                branch_target = replace(target, add=target.add or number > 0)
                self._block_and_norm(hidden, branch.before, branch.block, branch.after, branch_target)
        elif isinstance(block, Experts):
            lower_experts(self, hidden, before, block, target)
        else:
            self._dense(hidden, before, block, target)

    def _dense(self, hidden: Buffer, before: Norm | None, block: _Layer | Parallel, target: Sum) -> None:
        """Lower a layer, or several side by side."""
        layers = block.layers if isinstance(block, Parallel) else (block,)
        scales = (isinstance(block, Parallel) and block.scales) or (1.0,) * len(layers)
        last = [self._layer(hidden, before, layer) for layer in layers]
        for number, ((x, linear), scale) in enumerate(zip(last, scales, strict=True)):
            add = target.add or number > 0
            name, kind = ("linear_add", "add") if add else ("linear", "store")
            self.gemm(name, x, linear, target.out, Epilogue(kind, scale=target.scale * scale))

    def _layer(self, hidden: Buffer, before: Norm | None, layer: _Layer) -> tuple[PackedActivations, FusedLinear]:
        """Lower a layer up to its last linear layer, which is returned with its input."""
        if isinstance(layer, PerLayerInput):
            x = lower_per_layer_input(self, hidden, before, layer, self._graph.per_layer_inputs)
            return x, FusedLinear((layer.project,))
        if isinstance(layer, FeedForward):
            return self._feed_forward(hidden, before, layer), FusedLinear((layer.down,), place=self.place_of_down)
        self.begin_mixer()
        match layer:
            case Attention():
                x = self._attention(hidden, before, layer)
            case LatentAttention():
                x = lower_latent_attention(self, hidden, before, layer)
            case ShortConvolution():
                x = StateLowering(self, hidden, before).short_convolution(layer)
            case DeltaNet():
                x = StateLowering(self, hidden, before).delta_net(layer)
            case StateSpace():
                x = StateLowering(self, hidden, before).state_space(layer)
        return x, FusedLinear((layer.output,), place=self.place_of_attention_output)

    def _feed_forward(self, hidden: Buffer, before: Norm | None, operation: FeedForward) -> PackedActivations:
        return self.widen(
            self.norm(hidden, before, *self.runs(widening_of(operation), self.plan.hidden_size)), operation
        )

    def _attention(self, hidden: Buffer, before: Norm | None, operation: Attention) -> PackedActivations:
        """Lower attention up to its output layer: writes this step's K and V to their pages first."""
        qkv = self.project("qkv", hidden, before, FusedLinear(operation.projections))
        if (embedded := operation.embedded) is not None:
            self.project("qkv", self._embedded, embedded.norm, FusedLinear(embedded.layers), add=True)
        heads, layer = operation.heads, self.take_layer(operation.kv_source)
        queries = self.queries(heads)
        self._split_heads(qkv, operation, queries, layer)
        kernel = AttentionKernel(
            "attention", heads, operation.scale or 1.0 / math.sqrt(heads.dim), self.page_tiles,
            operation.window if operation.window < self.plan.limits.max_model_len else 0, operation.softcap,
            bool(operation.sinks), bidirectional=operation.bidirectional,
        )  # fmt: skip
        attended = self.attend(kernel, queries, layer, operation.sinks)
        if operation.gates:
            gates = self.project("attention_gates", hidden, before, FusedLinear(operation.gates))
            self.plan.add(GateKernel("gate", attended.columns), [attended.buffer, gates], "tokens")
        return attended

    def _split_heads(self, qkv: Buffer, operation: Attention, queries: Buffer, layer: KvLayer) -> None:
        heads, rotary, norms = operation.heads, operation.rotary, operation.head_norms
        has_keys = operation.kv_source is None
        operands: list[Operand] = [qkv, Buffer("positions", input=True), queries]
        if has_keys:
            operands += [Buffer("kv_slots", input=True), layer]
        if rotary is not None:
            rotary.check()
            operands.append(RopeTable(rotary, self.plan.limits.max_model_len))
        if norms is not None:
            sizes = (heads.query * heads.dim, heads.kv * heads.dim) if norms.joint else (heads.dim, heads.dim)
            for name, size in zip((norms.query, norms.key)[: 1 + has_keys], sizes, strict=False):
                operands.append(Vector((name,), (size,), offset=norms.weight_offset))
        kernel = SplitHeadsKernel("split_heads", heads, rows=_rows_of(operation))
        if rotary is not None:
            kernel = replace(kernel, rotary=rotary.dim, interleaved=rotary.interleaved, span=rotary.span)
        if norms is not None:
            if norms.joint and norms.after_rotation:
                raise ModelError(f"{norms.query} is a joint norm after the rotation, which is not supported")
            kernel = replace(
                kernel, norm="joint" if norms.joint else "head", epsilon=norms.epsilon,
                norm_after_rotation=norms.after_rotation, value_norm=norms.values and has_keys,
            )  # fmt: skip
        if operation.query_scale is not None:
            operands.append(QueryScales(operation.query_scale, self.plan.limits.max_model_len))
            kernel = replace(kernel, scaled=True)
        self.plan.add(kernel, operands, "tokens", repeats=heads.kv)


def _rows_of(operation: Attention) -> Literal["qkv", "qk", "q"]:
    """Return what the projections of an attention layer are."""
    if operation.kv_source is not None:
        return "q"
    return "qk" if operation.keys_as_values else "qkv"


def _check(graph: Graph, attentions: list[Attention | LatentAttention]) -> None:
    """Raise ModelError for sizes that no kernel can compute."""
    hidden_size = graph.embedding.hidden_size
    if hidden_size % 16:
        raise ModelError(f"hidden_size is {hidden_size}; it must be a multiple of 16")
    if not attentions:
        raise ModelError("the model's graph has no attention; models without KV pages are not supported")
    for residual in graph.residuals:
        _check_residual(residual)
    check_per_layer_inputs(graph)
    check_streams(graph)
    check_kv_sources(attentions)
    for number, attention in enumerate(attentions):
        heads, rotary = attention.heads, attention.rotary
        if heads.dim % 16 or heads.query % heads.kv:
            raise ModelError(
                f"config.json: num_attention_heads ({heads.query}) must be a multiple of num_key_value_heads "
                f"({heads.kv}), and head_dim ({heads.dim}) a multiple of 16"
            )
        if isinstance(attention, LatentAttention):
            continue
        outputs = sum(layer.outputs for layer in attention.projections)
        needed = (heads.query + (len(_rows_of(attention)) - 1) * heads.kv) * heads.dim
        if outputs != needed:
            raise ModelError(f"attention of layer {number} has {outputs} projection outputs; its heads need {needed}")
        if rotary is not None and (rotary.dim % 16 or not 0 < rotary.dim <= (rotary.span or rotary.dim) <= heads.dim):
            raise ModelError(
                f"attention of layer {number} rotates {rotary.dim} of {heads.dim} elements of a head; supported are "
                f"multiples of 16 up to {heads.dim}"
            )


def _check_residual(residual: Residual) -> None:
    """Raise ModelError for norms that the block cannot do without, or cannot have."""
    is_branches = isinstance(residual.block, Branches)
    if is_branches and (residual.before is not None or residual.after is None):
        raise ModelError("the sum of branches must have a norm after it, and none before")
    if residual.scalar and (residual.after is None or residual.around is not None):
        raise ModelError(f"{residual.scalar} multiplies a residual block, which must have a norm after it, none around")
