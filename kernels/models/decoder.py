"""The decoder that Llama, Mistral, Qwen2 and Qwen3 share: RMSNorm, rotary attention, gated feed-forward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from quire.kernels.config import ModelConfig
from quire.kernels.emit.math import ACTIVATIONS
from quire.kernels.errors import ModelError
from quire.kernels.graph.operations import (
    Attention,
    Embedding,
    FeedForward,
    Graph,
    HeadNorms,
    Heads,
    Linear,
    Logits,
    Norm,
    Residual,
)
from quire.kernels.rope import Rope


def window_of(config: ModelConfig) -> int:
    """Return the sliding window of config.json, 0 for none."""
    return 0 if config.fields.get("sliding_window") is None else config.size("sliding_window")


@dataclass(frozen=True)
class Variant:
    """Differences from Llama; `window(config, layer)` is the sliding window in tokens, 0 for none."""

    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    head_norms: bool = False
    window: Callable[[ModelConfig, int], int] = lambda config, layer: 0


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


def build_decoder(config: ModelConfig, variant: Variant) -> Graph:
    """Return the graph of the whole model."""
    hidden, inner = config.size("hidden_size"), config.size("intermediate_size")
    vocab, epsilon = config.size("vocab_size"), config.get("rms_norm_eps", 1e-6)
    heads, activation = heads_of(config), activation_of(config, "hidden_act", "silu")
    rope = Rope.from_config(config, heads.dim)
    query, kv = heads.query * heads.dim, heads.kv * heads.dim

    def linear(name: str, outputs: int, bias: bool) -> Linear:
        return Linear(f"{name}.weight", outputs, f"{name}.bias" if bias else "")

    residuals = []
    for i in range(config.size("num_hidden_layers")):
        layer = f"model.layers.{i}"
        at, mlp = f"{layer}.self_attn", f"{layer}.mlp"
        projections = [
            linear(f"{at}.{n}_proj", size, variant.qkv_bias) for n, size in zip("qkv", (query, kv, kv), strict=True)
        ]
        norms = HeadNorms(f"{at}.q_norm.weight", f"{at}.k_norm.weight", epsilon) if variant.head_norms else None
        attention = Attention(
            tuple(projections), linear(f"{at}.o_proj", hidden, variant.output_bias), heads, rotary=rope,
            head_norms=norms, window=variant.window(config, i),
        )  # fmt: skip
        gate, up = (linear(f"{mlp}.{name}_proj", inner, variant.mlp_bias) for name in ("gate", "up"))
        feed_forward = FeedForward(up, linear(f"{mlp}.down_proj", hidden, variant.mlp_bias), activation, gate)
        residuals.append(Residual(attention, Norm(f"{layer}.input_layernorm.weight", epsilon)))
        residuals.append(Residual(feed_forward, Norm(f"{layer}.post_attention_layernorm.weight", epsilon)))
    embedding = "model.embed_tokens"
    head = linear(embedding if config.get("tie_word_embeddings", False) else "lm_head", vocab, bias=False)
    logits = Logits(Norm("model.norm.weight", epsilon), head)
    return Graph(Embedding(f"{embedding}.weight", vocab, hidden), tuple(residuals), logits)
