"""Lowering of attention to KV pages, which all kinds of attention layers share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from quire.kernels._native import MAX_KV_SPLITS
from quire.kernels.attention_heads import Heads
from quire.kernels.emit.attention import BLOCK_TOKENS, AttentionKernel, SplitReductionKernel, split_bytes
from quire.kernels.emit.kv import KV_TILE, KvLayout
from quire.kernels.emit.layout import TILE_ROWS
from quire.kernels.errors import ModelError
from quire.kernels.graph.operations import Attention, LatentAttention
from quire.kernels.lowering.linear import LinearLowering
from quire.kernels.operands import Buffer, KvLayer, PackedActivations, Vector
from quire.kernels.plan import ModelPlan
from quire.kernels.weights.quantization import Place, Quantization


class AttentionLowering(LinearLowering):
    """Appends launches to a plan, and counts its attention layers, and all `mixers`: they and layers with state."""

    def __init__(self, plan: ModelPlan, quantization: Quantization, mixers: int) -> None:
        super().__init__(plan, quantization)
        self._kv_layers: list[KvLayer] = []  # of the attention layers lowered so far
        self._next_mixer, self._mixers = 0, mixers

    @property
    def page_tiles(self) -> int:
        """Number of KV tiles of a page."""
        return self.plan.limits.block_size // KV_TILE

    @property
    def place_of_attention_output(self) -> Place:
        """Place of the last linear layer of the mixer lowered last."""
        return "attention_output" if self._is_in_first_half else "body"

    @property
    def place_of_down(self) -> Place:
        """Place of the last linear layer of the feed-forward layer that follows the mixer lowered last."""
        return "feed_forward_output" if self._is_in_first_half else "body"

    @property
    def _is_in_first_half(self) -> bool:
        return 2 * self._next_mixer <= self._mixers

    def begin_mixer(self) -> None:
        """Count a layer in which tokens meet others."""
        self._next_mixer += 1

    def take_layer(self, kv_source: int | None = None) -> KvLayer:
        """Return the KV pages of the next attention layer, which are those of layer `kv_source` if that is given."""
        own = KvLayer(len(set(self._kv_layers)))
        self._kv_layers.append(own if kv_source is None else self._kv_layers[kv_source])
        return self._kv_layers[-1]

    def queries(self, heads: Heads) -> Buffer:
        """Return the buffer of packed queries. Their padding stays zero: no heads of another size share it."""
        rows = self.plan.limits.max_num_batched_tokens * heads.query + TILE_ROWS  # AMX reads whole tiles of rows
        return self.plan.buffer(f"queries_{heads.dim}", rows * KvLayout(heads, self.plan.dtypes).query_bytes)

    def attend(
        self, kernel: AttentionKernel, queries: Buffer, layer: KvLayer, sinks_name: str = ""
    ) -> PackedActivations:
        """Lower the attention of packed queries to the KV pages of a layer, with long contexts in splits."""
        plan, heads = self.plan, kernel.heads
        out = self.activations("attended", heads.query * heads.value_dim)
        sinks = [Vector((sinks_name,), (heads.query,))] if sinks_name else []
        entries = [Buffer("entries", input=True), queries, layer, out.buffer, *sinks]
        plan.add(kernel, entries, "entries", repeats=heads.kv)
        if plan.limits.max_model_len > BLOCK_TOKENS and not kernel.bidirectional:
            splits = plan.buffer("partials", MAX_KV_SPLITS * heads.query * split_bytes(heads))
            kernel = replace(kernel, name="attention_split", sinks=False, kv_split=True)
            plan.add(kernel, [Buffer("kv_splits", input=True), queries, layer, splits], "kv_splits", repeats=heads.kv)
            reduction = SplitReductionKernel("split_reduction", heads, kernel.window, bool(sinks))
            reductions = [Buffer("reductions", input=True), splits, out.buffer, *sinks]
            plan.add(reduction, reductions, "reductions", repeats=heads.kv)
        return out


def check_kv_sources(attentions: Sequence[Attention | LatentAttention]) -> None:
    """Raise ModelError unless the layers that read the KV of others find KV of their kind."""
    for number, attention in enumerate(attentions):
        source, heads = attention.kv_source, attention.heads
        if source is None:
            continue
        if not 0 <= source < number or attentions[source].kv_source is not None:
            raise ModelError(f"attention of layer {number} reads the KV of layer {source}, which has none before it")
        other = attentions[source].heads
        if (heads.kv, heads.dim, heads.latent) != (other.kv, other.dim, other.latent):
            raise ModelError(
                f"attention of layer {number} has {heads.kv} KV heads of {heads.dim} elements, but reads the KV of "
                f"layer {source}, which has {other.kv} of {other.dim}"
            )
