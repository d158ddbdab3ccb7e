"""The decoder that most architectures share with Llama: RMSNorm, rotary attention, gated feed-forward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from quire.kernels.activations import ACTIVATIONS
from quire.kernels.attention_heads import Heads
from quire.kernels.config import ModelConfig
from quire.kernels.errors import ModelError
from quire.kernels.graph.operations import (
    Attention,
    Embedding,
    Experts,
    FeedForward,
    Graph,
    HeadNorms,
    Linear,
    Logits,
    Mixer,
    Norm,
    Residual,
)
from quire.kernels.rope import QueryScale, Rope

_LAYER_TYPES = ("sliding_attention", "full_attention")


def window_of(config: ModelConfig) -> int:
    """Return the sliding window of config.json, 0 for none."""
    return 0 if config.fields.get("sliding_window") is None else config.size("sliding_window")


def sliding_layers(config: ModelConfig, period: int) -> list[bool]:
    """Return for each layer whether it has the sliding window: by `layer_types`, or else all but each `period`-th."""
    layers = config.size("num_hidden_layers")
    types = config.strings("layer_types")
    if not types:
        return [(layer + 1) % period != 0 for layer in range(layers)]
    if len(types) != layers or not set(types) <= set(_LAYER_TYPES):
        raise ModelError(
            f"config.json: {config.path}layer_types is {list(types)}; it must list one of {', '.join(_LAYER_TYPES)} "
            f"for each of the {layers} layers"
        )
    return [kind == "sliding_attention" for kind in types]


def rope_of_kind(config: ModelConfig, kind: str, before: dict[str, Any], theta: float) -> Rope:
    """Return the rotary embedding of the layers of a type, for models that have one for each.

    Its parameters are those of `rope_parameters` by layer type (transformers 5) with the default base `theta`, or
    `before`, what the fields of before say.
    """
    by_kind, parameters = config.section("rope_parameters"), before
    if by_kind.fields:
        if not set(by_kind.fields) <= set(_LAYER_TYPES):
            raise ModelError(
                f"config.json: {by_kind.path[:-1]} is {by_kind.fields}; it must have an object for each of "
                f"{', '.join(_LAYER_TYPES)}"
            )
        parameters = {"rope_theta": theta, **by_kind.options(kind)}
    fields = {**config.fields, "rope_scaling": None, "rope_parameters": parameters}
    return Rope.from_config(ModelConfig(fields), heads_of(config).dim)


@dataclass(frozen=True)
class NormNames:
    """Tensors of a layer's norms before and after a residual block; "" for no norm."""

    before: str = ""
    after: str = ""


@dataclass(frozen=True)
class Variant:
    """Differences from Llama.

    `window(config, layer)` is the sliding window in tokens, 0 for none, and `rotary(layer)` the rotary embedding; by
    default that of config.json. `activation` is the field that names the activation, and its default. Fused layers are
    one tensor, `qkv_proj` or `gate_up_proj`. `experts(config, layer)` are the experts of a layer, or another
    feed-forward layer than Llama's, None where it has that. `sinks`: attention has the tensor `sinks`.
    `head_norm_names` are the modules of the norms of query and key heads. `gated`: half of the outputs of each head's
    `q_proj` are its gates. `mixer(config, layer)` is the layer in place of attention, None where there is attention.
    """

    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    head_norms: bool = False
    joint_head_norms: bool = False
    head_norm_names: tuple[str, str] = ("q_norm", "k_norm")
    head_norms_after_rotation: bool = False
    fused_qkv: bool = False
    fused_gate_up: bool = False
    window: Callable[[ModelConfig, int], int] = lambda config, layer: 0
    rotary: Callable[[int], Rope | None] | None = None
    experts: Callable[[ModelConfig, int], Experts | FeedForward | None] = lambda config, layer: None
    sinks: bool = False
    gated: bool = False
    mixer: Callable[[ModelConfig, int], Mixer | None] = lambda config, layer: None
    activation: tuple[str, str] = ("hidden_act", "silu")
    attention_norms: NormNames = NormNames("input_layernorm")
    mlp_norms: NormNames = NormNames("post_attention_layernorm")
    norm_offset: float = 0.0
    attention_scale: float | None = None
    attention_softcap: float = 0.0
    query_scale: QueryScale | None = None
    bidirectional: bool = False
    embedding_scale: float = 1.0
    residual_multiplier: float = 1.0
    logits_scale: float = 1.0
    logits_softcap: float = 0.0


def activation_of(config: ModelConfig, field: str, default: str) -> str:
    """Return the activation that config.json names in `field`."""
    name = config.get(field, default)
    if name not in ACTIVATIONS:
        raise ModelError(f"config.json: {field} is {name!r}; supported are {', '.join(ACTIVATIONS)}")
    return name


def heads_of(config: ModelConfig) -> Heads:
    """Return the attention heads that config.json describes."""
    query = config.size("num_attention_heads")
    hidden = config.size("hidden_size")
    return Heads(query, config.size("num_key_value_heads", query), config.size("head_dim", hidden // query))


def head_of(config: ModelConfig, embedding: Embedding, tied: bool) -> Linear:
    """Return the layer of the logits; it has the weights of the embedding if config.json, or else `tied`, says so."""
    is_tied = config.get("tie_word_embeddings", tied)
    return Linear(embedding.weight if is_tied else "lm_head.weight", embedding.vocab_size)


def build_decoder(config: ModelConfig, variant: Variant) -> Graph:
    """Return the graph of the whole model."""
    hidden, vocab = config.size("hidden_size"), config.size("vocab_size")
    layers = Layers(config, variant)
    residuals = [
        residual
        for layer in range(config.size("num_hidden_layers"))
        for residual in (layers.mixer(layer), layers.feed_forward(layer))
    ]
    embedding = Embedding("model.embed_tokens.weight", vocab, hidden, variant.embedding_scale)
    head = head_of(config, embedding, tied=False)
    logits = Logits(layers.norm("model.norm"), head, variant.logits_scale, variant.logits_softcap)
    return Graph(embedding, tuple(residuals), logits)


class Layers:
    """Builder of the residual blocks; `at` are the tensors of a layer."""

    def __init__(
        self, config: ModelConfig, variant: Variant, at: Callable[[int], str] = lambda number: f"model.layers.{number}"
    ) -> None:
        self._at = at
        self._config = config
        self._variant = variant
        self._hidden = config.size("hidden_size")
        self._epsilon = config.get("rms_norm_eps", 1e-6)
        self._heads = heads_of(config)
        if variant.rotary is None:
            rope = Rope.from_config(config, self._heads.dim)
            self._rotary: Callable[[int], Rope | None] = lambda layer: rope
        else:
            self._rotary = variant.rotary

    def norm(self, name: str) -> Norm:
        """Build a norm."""
        return Norm(f"{name}.weight", self._epsilon, weight_offset=self._variant.norm_offset)

    def mixer(self, number: int) -> Residual:
        """Build the attention, or what there is in its place."""
        other = self._variant.mixer(self._config, number)
        return self.attention(number) if other is None else self._residual(number, other, self._variant.attention_norms)

    def attention(self, number: int) -> Residual:
        """Build the attention."""
        variant, heads, at = self._variant, self._heads, f"{self._at(number)}.self_attn"
        sizes = {"q": heads.query * heads.dim, "k": heads.kv * heads.dim, "v": heads.kv * heads.dim}
        if variant.fused_qkv:
            sizes = {"qkv": sum(sizes.values())}
        projections = tuple(_linear(f"{at}.{name}_proj", size, variant.qkv_bias) for name, size in sizes.items())
        gates: tuple[Linear, ...] = ()
        if variant.gated:
            queries, gates = _interleaved(projections[0], heads)
            projections = (*queries, *projections[1:])
        query_norm, key_norm = (f"{at}.{name}.weight" for name in variant.head_norm_names)
        norms = HeadNorms(
            query_norm, key_norm, self._epsilon, variant.norm_offset, variant.joint_head_norms,
            variant.head_norms_after_rotation,
        )  # fmt: skip
        attention = Attention(
            projections, _linear(f"{at}.o_proj", self._hidden, variant.output_bias), heads,
            rotary=self._rotary(number), head_norms=norms if variant.head_norms else None,
            window=variant.window(self._config, number), scale=variant.attention_scale,
            softcap=variant.attention_softcap, sinks=f"{at}.sinks" if variant.sinks else "",
            bidirectional=variant.bidirectional, query_scale=variant.query_scale, gates=gates,
        )  # fmt: skip
        return self._residual(number, attention, variant.attention_norms)

    def feed_forward(self, number: int) -> Residual:
        """Build the feed-forward layer, or the experts."""
        block = self._variant.experts(self._config, number) or self._dense(number)
        return self._residual(number, block, self._variant.mlp_norms)

    def _dense(self, number: int) -> FeedForward:
        variant, mlp, inner = self._variant, f"{self._at(number)}.mlp", self._config.size("intermediate_size")
        gate, up = (_linear(f"{mlp}.{name}_proj", inner, variant.mlp_bias) for name in ("gate", "up"))
        if variant.fused_gate_up:
            weight, both = f"{mlp}.gate_up_proj.weight", 2 * inner
            gate, up = (Linear(weight, inner, first=first, tensor_outputs=both) for first in (0, inner))
        down = _linear(f"{mlp}.down_proj", self._hidden, variant.mlp_bias)
        return FeedForward(up, down, activation_of(self._config, *variant.activation), gate)

    def _residual(self, number: int, block: Mixer | FeedForward | Experts, names: NormNames) -> Residual:
        before, after = (
            self.norm(f"{self._at(number)}.{name}") if name else None for name in (names.before, names.after)
        )
        return Residual(block, before, after, self._variant.residual_multiplier)


def _linear(name: str, outputs: int, bias: bool) -> Linear:
    return Linear(f"{name}.weight", outputs, f"{name}.bias" if bias else "")


def _interleaved(linear: Linear, heads: Heads) -> tuple[tuple[Linear, ...], tuple[Linear, ...]]:
    """Return the layers of queries and of gates, which a tensor has in turns, head by head."""
    first, second = (
        tuple(
            replace(linear, outputs=heads.dim, first=(2 * head + half) * heads.dim, tensor_outputs=2 * linear.outputs)
            for head in range(heads.query)
        )
        for half in range(2)
    )
    return first, second
