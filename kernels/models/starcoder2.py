"""StarCoder 2, class Starcoder2ForCausalLM (Lozhkov et al. 2024): LayerNorm, biases, a feed-forward without a gate."""

from __future__ import annotations

from quire.kernels.config import ModelConfig
from quire.kernels.graph.operations import (
    Attention,
    Embedding,
    FeedForward,
    Graph,
    Linear,
    Logits,
    Norm,
    Residual,
)
from quire.kernels.models.decoder import activation_of, head_of, heads_of, window_of
from quire.kernels.rope import Rope


def build(config: ModelConfig) -> Graph:
    """Return the graph of a Starcoder2ForCausalLM."""
    config = config.with_defaults(num_key_value_heads=2, max_position_embeddings=4096)
    config.restrict("norm_type", ("layer_norm",))
    config.restrict("mlp_type", ("default",))
    hidden, inner, vocab = (config.size(name) for name in ("hidden_size", "intermediate_size", "vocab_size"))
    epsilon, bias = config.get("norm_epsilon", 1e-5), config.get("use_bias", True)
    activation, window = activation_of(config, "hidden_act", "gelu_pytorch_tanh"), window_of(config)
    heads = heads_of(config)
    rope = Rope.from_config(config, heads.dim)
    sizes = {"q": heads.query * heads.dim, "k": heads.kv * heads.dim, "v": heads.kv * heads.dim}

    def norm(name: str) -> Norm:
        return Norm(f"{name}.weight", epsilon, f"{name}.bias", center=True)

    def linear(name: str, outputs: int) -> Linear:
        return Linear(f"{name}.weight", outputs, f"{name}.bias" if bias else "")

    residuals = []
    for i in range(config.size("num_hidden_layers")):
        layer = f"model.layers.{i}"
        at, mlp = f"{layer}.self_attn", f"{layer}.mlp"
        projections = tuple(linear(f"{at}.{name}_proj", size) for name, size in sizes.items())
        attention = Attention(projections, linear(f"{at}.o_proj", hidden), heads, rotary=rope, window=window)
        feed_forward = FeedForward(linear(f"{mlp}.c_fc", inner), linear(f"{mlp}.c_proj", hidden), activation)
        residuals.append(Residual(attention, norm(f"{layer}.input_layernorm")))
        residuals.append(Residual(feed_forward, norm(f"{layer}.post_attention_layernorm")))
    embedding = Embedding("model.embed_tokens.weight", vocab, hidden)
    return Graph(embedding, tuple(residuals), Logits(norm("model.norm"), head_of(config, embedding, tied=True)))
