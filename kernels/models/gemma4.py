"""Gemma 4, class Gemma4ForCausalLM (Google 2026), and the text part of Gemma4ForConditionalGeneration.

As Gemma 3 with a norm of value heads in place of a scale of the scores, and norms that multiply by their weight alone.
Layers without a window have heads of their own size and number, rotate a part of them, and may use keys as values. The
last layers may read the keys and values of the last layer of their kind before them. Small models add inputs that each
layer has for each token, mixtures add experts to the feed-forward layer of each layer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from quire.kernels.attention_heads import Heads
from quire.kernels.config import ModelConfig
from quire.kernels.errors import ModelError
from quire.kernels.graph.operations import (
    Attention,
    Branch,
    Branches,
    Embedding,
    ExpertRouter,
    Experts,
    Graph,
    HeadNorms,
    Linear,
    Logits,
    Norm,
    PerLayerInput,
    PerLayerInputs,
    Residual,
)
from quire.kernels.models.decoder import activation_of, head_of, sliding_layers, window_of
from quire.kernels.models.experts import expert_layers, feed_forward
from quire.kernels.models.gemma2 import ACTIVATION, softcap
from quire.kernels.rope import Rope

_ROPES: dict[str, dict[str, Any]] = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}


def build(config: ModelConfig) -> Graph:
    """Return the graph of a Gemma4ForCausalLM."""
    config = config.with_defaults(
        vocab_size=262144, hidden_size=2304, intermediate_size=9216, num_hidden_layers=30, num_attention_heads=8,
        num_key_value_heads=4, head_dim=256, max_position_embeddings=131072, sliding_window=512,
        tie_word_embeddings=True, global_head_dim=512, vocab_size_per_layer_input=262144,
        hidden_size_per_layer_input=256,
    )  # fmt: skip
    config.restrict("use_bidirectional_attention", ("vision",))
    config.restrict("rope_scaling")
    return _Gemma4(config).build()


def per_layer_inputs(config: ModelConfig, epsilon: float, *, first_for_others: bool = False) -> PerLayerInputs:
    """Return the rows that each layer reads for a token; `first_for_others`: the table may be shorter than the
    vocabulary."""
    width, hidden = config.size("hidden_size_per_layer_input"), config.size("hidden_size")
    vocab, columns = config.size("vocab_size_per_layer_input"), config.size("num_hidden_layers") * width
    embedding = Embedding(
        "model.embed_tokens_per_layer.weight", vocab, columns, math.sqrt(width), first_for_others=first_for_others
    )
    return PerLayerInputs(
        embedding, Linear("model.per_layer_model_projection.weight", columns), 1 / math.sqrt(hidden),
        Norm("model.per_layer_projection_norm.weight", epsilon), width, 1 / math.sqrt(2),
    )  # fmt: skip


def kv_source(config: ModelConfig, kinds: Sequence[str], number: int) -> int | None:
    """Return the layer whose keys and values a layer reads, None if it has its own. Raises ModelError."""
    first_shared = len(kinds) - config.get("num_kv_shared_layers", 0)
    if number < first_shared:
        return None
    sources = [layer for layer in range(first_shared) if kinds[layer] == kinds[number]]
    if not sources:
        raise ModelError(
            f"config.json: {config.path}num_kv_shared_layers is {len(kinds) - first_shared}, but no layer before them "
            f"is of type {kinds[number]}, whose keys and values layer {number} could read"
        )
    return sources[-1]


class _Gemma4:
    """Builder of the graph."""

    def __init__(self, config: ModelConfig) -> None:
        self._config = config
        self._hidden, self._layers = config.size("hidden_size"), config.size("num_hidden_layers")
        self._epsilon = config.get("rms_norm_eps", 1e-6)
        self._activation = activation_of(config, *ACTIVATION)
        self._bias = config.get("attention_bias", False)
        self._kinds = _kinds(config)
        self._ropes: dict[tuple[str, int], Rope] = {}

    def build(self) -> Graph:
        """Return the graph of the whole model."""
        vocab = self._config.size("vocab_size")
        embedding = Embedding("model.embed_tokens.weight", vocab, self._hidden, math.sqrt(self._hidden))
        residuals = [residual for layer in range(self._layers) for residual in self._residuals(layer)]
        head, cap = head_of(self._config, embedding, tied=True), softcap(self._config, "final_logit_softcapping")
        logits = Logits(self._norm("model.norm"), head, softcap=cap)
        inputs = per_layer_inputs(self._config, self._epsilon) if self._input_width else None
        return Graph(embedding, tuple(residuals), logits, per_layer_inputs=inputs)

    @property
    def _input_width(self) -> int:
        """Elements of a per-layer input, 0 for none."""
        name = "hidden_size_per_layer_input"
        return self._config.size(name) if self._config.get(name, 0) else 0

    def _residuals(self, number: int) -> Iterator[Residual]:
        """Yield the residual blocks of a layer, the last of which has its scalar."""
        at = f"model.layers.{number}"
        scalar = f"{at}.layer_scalar"
        yield Residual(
            self._attention(number), self._norm(f"{at}.input_layernorm"), self._norm(f"{at}.post_attention_layernorm")
        )
        yield self._feed_forward(number, "" if self._input_width else scalar)
        if self._input_width:
            gate = Linear(f"{at}.per_layer_input_gate.weight", self._input_width)
            project = Linear(f"{at}.per_layer_projection.weight", self._hidden)
            norm = self._norm(f"{at}.post_per_layer_input_norm")
            yield Residual(PerLayerInput(gate, project, self._activation, number), None, norm, scalar=scalar)

    def _attention(self, number: int) -> Attention:
        heads, kind, at = self._heads(number), self._kinds[number], f"model.layers.{number}.self_attn"
        keys_as_values = kind == "full_attention" and self._config.get("attention_k_eq_v", False)
        source = kv_source(self._config, self._kinds, number)
        sizes = {"q": heads.query * heads.dim, "k": heads.kv * heads.dim, "v": heads.kv * heads.dim}
        names = "q" if source is not None else "qk" if keys_as_values else "qkv"
        return Attention(
            tuple(self._linear(f"{at}.{name}_proj", sizes[name]) for name in names),
            self._linear(f"{at}.o_proj", self._hidden), heads, self._rope(kind, heads.dim),
            HeadNorms(f"{at}.q_norm.weight", f"{at}.k_norm.weight", self._epsilon, values=True),
            window=window_of(self._config) if kind == "sliding_attention" else 0, scale=1.0,
            keys_as_values=keys_as_values, kv_source=source,
            unread=() if source is None else tuple(self._linear(f"{at}.{name}_proj", sizes[name]) for name in "kv"),
        )  # fmt: skip

    def _feed_forward(self, number: int, scalar: str) -> Residual:
        """Return the feed-forward layer, twice as wide where keys and values are shared, and the experts beside it."""
        config, at = self._config, f"model.layers.{number}"
        is_double = config.get("use_double_wide_mlp", False) and kv_source(config, self._kinds, number) is not None
        inner = config.size("intermediate_size") * (2 if is_double else 1)
        dense = feed_forward(f"{at}.mlp", self._hidden, inner, self._activation)
        before, after = (self._norm(f"{at}.{name}_feedforward_layernorm") for name in ("pre", "post"))
        if not config.get("enable_moe_block", False):
            return Residual(dense, before, after, scalar=scalar)
        first, second = (self._norm(f"{at}.post_feedforward_layernorm_{branch}") for branch in (1, 2))
        experts = Branch(self._experts(at), self._norm(f"{at}.pre_feedforward_layernorm_2"), second)
        return Residual(Branches((Branch(dense, before, first), experts)), None, after, scalar=scalar)

    def _experts(self, at: str) -> Experts:
        config = self._config
        count, inner = config.size("num_experts"), config.size("moe_intermediate_size")
        router = ExpertRouter(
            Linear(f"{at}.router.proj.weight", count), config.size("top_k_experts"), normalize=True,
            expert_scales=f"{at}.router.per_expert_scale", norm=Norm(f"{at}.router.scale", self._epsilon),
            output_scale=1 / math.sqrt(self._hidden),
        )  # fmt: skip
        return Experts(router, expert_layers(f"{at}.experts", count, self._hidden, inner, self._activation))

    def _heads(self, number: int) -> Heads:
        """Return the heads of a layer: those of config.json, or of its `per_layer_config` or `global_` fields."""
        config, query = self._config, self._config.size("num_attention_heads")
        kv, dim = "num_key_value_heads", "head_dim"
        if (by_layer := config.section("per_layer_config")).fields:
            layer = by_layer.section(str(number))
            return Heads(query, layer.size(kv, config.size(kv)), layer.size(dim, config.size(dim)))
        if self._kinds[number] == "sliding_attention":
            return Heads(query, config.size(kv), config.size(dim))
        is_own = config.get("attention_k_eq_v", False)
        kv_heads = config.size("num_global_key_value_heads", config.size(kv)) if is_own else config.size(kv)
        return Heads(query, kv_heads, config.size("global_head_dim"))

    def _rope(self, kind: str, dim: int) -> Rope:
        """Return the rotary embedding that layers of a kind share, whose heads have `dim` elements."""
        config, by_kind = self._config, self._config.section("rope_parameters")
        if not set(by_kind.fields) <= set(_ROPES):
            raise ModelError(
                f"config.json: {by_kind.path[:-1]} is {by_kind.fields}; it must have an object for each of "
                f"{', '.join(_ROPES)}"
            )
        if (kind, dim) not in self._ropes:
            fields = {**config.fields, "rope_parameters": by_kind.options(kind) or _ROPES[kind]}
            self._ropes[kind, dim] = replace(Rope.from_config(ModelConfig(fields), dim), extended=True)
        return self._ropes[kind, dim]

    def _norm(self, name: str) -> Norm:
        return Norm(f"{name}.weight", self._epsilon)

    def _linear(self, name: str, outputs: int) -> Linear:
        return Linear(f"{name}.weight", outputs, f"{name}.bias" if self._bias else "")


def _kinds(config: ModelConfig) -> list[str]:
    """Return the kind of attention of each layer; the last one never has a window."""
    sliding = [*sliding_layers(config, 6)[:-1], False]
    return ["sliding_attention" if is_sliding else "full_attention" for is_sliding in sliding]
