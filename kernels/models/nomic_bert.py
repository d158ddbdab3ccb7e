"""Nomic Embed (Nussbaum et al. 2024), class NomicBertModel: BERT with rotary embeddings, SwiGLU and few biases.

Checkpoints of its authors have the fields of GPT-2 in config.json; those of `transformers` have BERT's.
"""

from __future__ import annotations

from typing import Any

from quire.kernels.attention_heads import Heads
from quire.kernels.config import ModelConfig
from quire.kernels.errors import ModelError
from quire.kernels.graph.operations import (
    Attention,
    Embedding,
    FeedForward,
    Graph,
    HiddenStates,
    Linear,
    Norm,
    Residual,
)
from quire.kernels.models.decoder import activation_of
from quire.kernels.rope import Rope

_NAMES = {
    "n_embd": "hidden_size", "n_inner": "intermediate_size", "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads", "layer_norm_epsilon": "layer_norm_eps", "rotary_emb_base": "rope_theta",
    "max_trained_positions": "max_position_embeddings",
}  # fmt: skip
_ONLY: dict[str, tuple[Any, ...]] = {
    "activation_function": ("swiglu",), "prenorm": (False,), "parallel_block": (False,), "use_rms_norm": (False,),
    "causal": (False,), "rotary_emb_fraction": (1, 1.0), "rotary_emb_interleaved": (False,),
    "rotary_emb_scale_base": (), "qkv_proj_bias": (False,), "mlp_fc1_bias": (False,), "mlp_fc2_bias": (False,),
    "moe_every_n_layers": (0,),
}  # fmt: skip


def build(config: ModelConfig) -> Graph:
    """Return the graph of a NomicBertModel. Its positions are those that it was trained for, without scaling."""
    for name, allowed in _ONLY.items():
        config.restrict(name, allowed)
    config = ModelConfig({_NAMES.get(name, name): value for name, value in config.fields.items()})
    config = config.with_defaults(max_position_embeddings=2048, rope_theta=1000.0)
    hidden, inner, vocab = (config.size(name) for name in ("hidden_size", "intermediate_size", "vocab_size"))
    num_heads, epsilon = config.size("num_attention_heads"), config.get("layer_norm_eps", 1e-12)
    if hidden % num_heads:
        raise ModelError(f"config.json: hidden_size ({hidden}) must be a multiple of num_attention_heads ({num_heads})")
    heads = Heads(num_heads, num_heads, hidden // num_heads)
    config.restrict("head_dim", (heads.dim,))
    activation, rope = activation_of(config, "hidden_act", "silu"), Rope.from_config(config, heads.dim)

    def norm(name: str) -> Norm:
        return Norm(f"bert.{name}.weight", epsilon, f"bert.{name}.bias", center=True)

    def linear(name: str, outputs: int) -> Linear:
        return Linear(f"bert.encoder.layers.{name}.weight", outputs)

    residuals = []
    for i in range(config.size("num_hidden_layers")):
        attention = Attention(
            (linear(f"{i}.attn.Wqkv", 3 * hidden),), linear(f"{i}.attn.out_proj", hidden), heads, rotary=rope,
            bidirectional=True,
        )  # fmt: skip
        up, gate, down = (
            linear(f"{i}.mlp.{name}", size) for name, size in (("fc11", inner), ("fc12", inner), ("fc2", hidden))
        )
        residuals.append(Residual(attention, None, around=norm(f"encoder.layers.{i}.norm1")))
        residuals.append(
            Residual(FeedForward(up, down, activation, gate), None, around=norm(f"encoder.layers.{i}.norm2"))
        )
    embedding = Embedding(
        "bert.embeddings.word_embeddings.weight", vocab, hidden, norm=norm("emb_ln"),
        types="bert.embeddings.token_type_embeddings.weight", num_types=config.size("type_vocab_size", 2),
    )  # fmt: skip
    return Graph(embedding, tuple(residuals), HiddenStates(None))
