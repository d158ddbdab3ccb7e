"""Lowering of multi-head latent attention, with each head's part of `expand` absorbed into queries and outputs.

q k = q_rope k_rope + q_nope (W_UK c) = q_rope k_rope + (q_nope W_UK) c, and likewise for values. So all heads attend to
one key [k_rope, c], whose last elements are the value, and KV pages hold nothing else. Prefill and decode are computed
alike, so that both give the same bits.
"""

from __future__ import annotations

from quire.kernels.emit.attention import AttentionKernel
from quire.kernels.emit.head_linear import HeadLinearKernel
from quire.kernels.emit.latent_heads import LatentHeadsKernel
from quire.kernels.emit.layout import BLOCK, TILE_ROWS, round_up
from quire.kernels.errors import ModelError
from quire.kernels.graph.operations import LatentAttention, Linear, Norm
from quire.kernels.lowering.attention import AttentionLowering
from quire.kernels.lowering.fused import FusedLinear
from quire.kernels.operands import Buffer, KvLayer, Matrix, MatrixPart, PackedActivations, RopeTable, Vector


def lower_latent_attention(
    lowering: AttentionLowering, hidden: Buffer, before: Norm | None, operation: LatentAttention
) -> PackedActivations:
    """Lower latent attention up to its output layer."""
    _check(lowering, operation)
    return _LatentLowering(lowering, operation).lower(hidden, before)


class _LatentLowering:
    def __init__(self, lowering: AttentionLowering, operation: LatentAttention) -> None:
        self._lowering, self._plan, self._operation = lowering, lowering.plan, operation
        self._latent_heads, self._heads = operation.latent_heads, operation.heads

    def lower(self, hidden: Buffer, before: Norm | None) -> PackedActivations:
        """Append the launches."""
        h, queries = self._latent_heads, self._lowering.queries(self._heads)
        parts = self._lowering.activations("query_parts", h.query * h.nope)
        layer = self._lowering.take_layer()
        self._split_heads(hidden, before, queries, parts, layer)
        absorb = HeadLinearKernel("absorb_key", h.query, h.nope, h.rank, "queries", self._heads, h.rope)
        self._head_linear(absorb, parts, self._keys(), queries)
        kernel = AttentionKernel("attention", self._heads, self._operation.scale, self._lowering.page_tiles)
        latents = self._lowering.attend(kernel, queries, layer)
        out = self._lowering.activations("attended_values", h.query * h.value)
        expand = HeadLinearKernel("expand_value", h.query, h.rank, h.value)
        self._head_linear(expand, latents, self._values(), out.buffer)
        return out

    def _split_heads(
        self, hidden: Buffer, before: Norm | None, queries: Buffer, parts: PackedActivations, layer: KvLayer
    ) -> None:
        """Lower the projections, and the kernel that takes them apart."""
        operation, lowering, h = self._operation, self._lowering, self._latent_heads
        first = operation.compress or operation.query
        columns = first.outputs + operation.latent.outputs
        projected = lowering.project("qkv", hidden, before, FusedLinear((first, operation.latent)))
        rows, query_columns = projected, columns
        if operation.compress is not None:
            rows, query_columns = lowering.rows("expanded_queries", operation.query.outputs), operation.query.outputs
            self._expand_queries(projected, columns, rows)
        operation.rotary.check()
        kernel = LatentHeadsKernel(
            "latent_heads", h, round_up(query_columns, BLOCK), round_up(columns, BLOCK), first.outputs,
            operation.rotary.interleaved, operation.latent_norm.epsilon,
        )  # fmt: skip
        norm = Vector((operation.latent_norm.weight,), (h.rank,), offset=operation.latent_norm.weight_offset)
        table = RopeTable(operation.rotary, self._plan.limits.max_model_len)
        inputs = Buffer("positions", input=True), Buffer("kv_slots", input=True)
        self._plan.add(kernel, [rows, projected, *inputs, norm, table, queries, parts.buffer, layer], "tokens")

    def _expand_queries(self, projected: Buffer, columns: int, out: Buffer) -> None:
        """Lower the norm of compressed queries, the first of `columns` columns, and the layer after it."""
        operation, lowering = self._operation, self._lowering
        if operation.compress is None:
            return
        width, expand = operation.compress.outputs, FusedLinear((operation.query,))
        queries = "compressed_queries"
        x = lowering.norm(projected, operation.query_norm, expand, width=width, name=queries, row_columns=columns)
        lowering.gemm("linear", x, expand, out)

    def _keys(self) -> Matrix:
        """Return the transposed key parts of `expand`, one head after the other."""
        h, expand = self._latent_heads, self._operation.expand
        parts = [
            MatrixPart(
                expand.weight, h.rank, h.nope, transposed=True, first_tile=head * h.rank // TILE_ROWS,
                first_k=head * h.expanded, tensor_k=expand.outputs,
            )
            for head in range(h.query)
        ]  # fmt: skip
        return Matrix(tuple(parts), h.query * h.rank, h.nope)

    def _values(self) -> Matrix:
        """Return the value parts of `expand`, one head after the other."""
        h, expand = self._latent_heads, self._operation.expand
        parts = [
            MatrixPart(
                expand.weight, h.value, h.rank, first_tile=head * h.value // TILE_ROWS,
                first=head * h.expanded + h.nope, tensor_n=expand.outputs,
            )
            for head in range(h.query)
        ]  # fmt: skip
        return Matrix(tuple(parts), h.query * h.value, h.rank)

    def _head_linear(self, kernel: HeadLinearKernel, x: PackedActivations, matrix: Matrix, out: Buffer) -> None:
        rows_per_item = self._plan.context.rows_per_item
        self._plan.add(
            kernel, [x.buffer, matrix, out], "tokens", rows_per_item=rows_per_item, repeats=matrix.n // BLOCK
        )


def _check(lowering: AttentionLowering, operation: LatentAttention) -> None:
    """Raise ModelError for sizes and formats that no kernel can compute."""
    h, name = operation.latent_heads, operation.expand.weight
    sizes = {
        "qk_nope_head_dim": h.nope, "qk_rope_head_dim": h.rope, "v_head_dim": h.value, "kv_lora_rank": h.rank
    }  # fmt: skip
    for field, size in sizes.items():
        if size % BLOCK:
            raise ModelError(f"config.json: {field} is {size}; latent attention needs a multiple of {BLOCK}")
    if operation.rotary.dim != h.rope:
        raise ModelError(f"latent attention rotates {operation.rotary.dim} elements; qk_rope_head_dim is {h.rope}")
    if operation.compress is not None and operation.compress.outputs % 16:
        raise ModelError(f"config.json: q_lora_rank is {operation.compress.outputs}; it must be a multiple of 16")
    _check_outputs(operation)
    scheme = lowering.quantization.scheme
    if scheme is not None and lowering.quantization.format_of((operation.expand,), h.rank) is not None:
        raise ModelError(
            f"{name} is quantized by {scheme.method}; latent attention takes it apart by heads, so it must be float: "
            "quantize the checkpoint without its kv_b_proj layers"
        )


def _check_outputs(operation: LatentAttention) -> None:
    """Raise ModelError for layers whose outputs do not fit the heads."""
    h = operation.latent_heads
    needed: dict[Linear, int] = {
        operation.query: h.query * (h.nope + h.rope),
        operation.latent: h.rank + h.rope,
        operation.expand: h.query * h.expanded,
    }
    for linear, outputs in needed.items():
        if linear.outputs != outputs:
            raise ModelError(f"{linear.weight} has {linear.outputs} outputs; its heads need {outputs}")
    first = operation.compress or operation.query
    if bool(first.bias) != bool(operation.latent.bias) or (operation.query.bias and operation.compress is not None):
        raise ModelError(
            f"{first.weight} and {operation.latent.weight} must both have a bias, or neither; {operation.query.weight} "
            "may have none"
        )
