"""Command R7B and others of class Cohere2ForCausalLM: attention beside the feed-forward, LayerNorm without bias.

Layers with a sliding window have a rotary embedding of neighbouring elements, those without a window have none.
"""

from __future__ import annotations

from dataclasses import replace

from quire.kernels.config import ModelConfig
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
from quire.kernels.models.decoder import activation_of, head_of, heads_of, sliding_layers
from quire.kernels.rope import Rope


def build(config: ModelConfig) -> Graph:
    """Return the graph of a Cohere2ForCausalLM."""
    config = config.with_defaults(sliding_window=4096, max_position_embeddings=8192)
    config.restrict("use_qk_norm", (False,))
    config.restrict("use_parallel_block", (True,))
    config.restrict("use_gated_activation", (True,))
    hidden, inner, vocab = (config.size(name) for name in ("hidden_size", "intermediate_size", "vocab_size"))
    bias, epsilon = config.get("attention_bias", False), config.get("layer_norm_eps", 1e-5)
    heads, activation = heads_of(config), activation_of(config, "hidden_act", "silu")
    window = config.size("sliding_window")
    rope = replace(Rope.from_config(config, heads.dim), interleaved=True)
    sizes = {"q": heads.query * heads.dim, "k": heads.kv * heads.dim, "v": heads.kv * heads.dim}

    def norm(name: str) -> Norm:
        return Norm(f"{name}.weight", epsilon, center=True)

    def linear(name: str, outputs: int, bias: bool = False) -> Linear:
        return Linear(f"{name}.weight", outputs, f"{name}.bias" if bias else "")

    residuals = []
    for i, sliding in enumerate(sliding_layers(config, config.size("sliding_window_pattern", 4))):
        layer = f"model.layers.{i}"
        at, mlp = f"{layer}.self_attn", f"{layer}.mlp"
        attention = Attention(
            tuple(linear(f"{at}.{name}_proj", size, bias) for name, size in sizes.items()),
            linear(f"{at}.o_proj", hidden, bias), heads,
            rotary=rope if sliding else None, window=window if sliding else 0,
        )  # fmt: skip
        gate, up = (linear(f"{mlp}.{name}_proj", inner) for name in ("gate", "up"))
        feed_forward = FeedForward(up, linear(f"{mlp}.down_proj", hidden), activation, gate)
        residuals.append(Residual(Parallel((attention, feed_forward)), norm(f"{layer}.input_layernorm")))
    embedding = Embedding("model.embed_tokens.weight", vocab, hidden)
    head = head_of(config, embedding, tied=True)
    logits = Logits(norm("model.norm"), head, config.positive("logit_scale", 0.0625))
    return Graph(embedding, tuple(residuals), logits)
