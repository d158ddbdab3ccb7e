"""The decoder that Llama, Mistral, Qwen2 and Qwen3 share: RMSNorm, rotary attention, gated feed-forward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from quire.kernels.config import ModelConfig
from quire.kernels.emit.kv import Heads
from quire.kernels.emit.math import ACTIVATIONS
from quire.kernels.errors import ModelError
from quire.kernels.operands import Linear
from quire.kernels.plan import PlanBuilder
from quire.kernels.rope import Rope


def no_window(config: ModelConfig, layer: int) -> int:
    """Every layer attends to all that came before."""
    return 0


def window_of(config: ModelConfig) -> int:
    """The sliding window of config.json, 0 for none."""
    return 0 if config.fields.get("sliding_window") is None else config.size("sliding_window")


@dataclass(frozen=True)
class Variant:
    """How an architecture differs from plain Llama.

    `window(config, layer)` is the sliding window in tokens, 0 for none.
    """

    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    head_norms: bool = False
    window: Callable[[ModelConfig, int], int] = no_window


def activation_of(config: ModelConfig, field: str, default: str) -> str:
    """The activation that config.json names in `field`."""
    name = config.get(field, default)
    if name not in ACTIVATIONS:
        raise ModelError(f"config.json: {field} is {name!r}; supported are {', '.join(ACTIVATIONS)}")
    return name


def heads_of(config: ModelConfig) -> Heads:
    """The attention heads that config.json describes."""
    query = config.size("num_attention_heads")
    hidden = config.size("hidden_size")
    return Heads(query, config.size("num_key_value_heads", query), config.size("head_dim", hidden // query))


def build_decoder(p: PlanBuilder, config: ModelConfig, variant: Variant) -> None:
    """Adds the launches of the whole model to the plan."""
    hidden, inner = config.size("hidden_size"), config.size("intermediate_size")
    vocab, epsilon = config.size("vocab_size"), config.get("rms_norm_eps", 1e-6)
    heads, activation = heads_of(config), activation_of(config, "hidden_act", "silu")
    rope = Rope.from_config(config, heads.dim)
    query, kv = heads.query * heads.dim, heads.kv * heads.dim
    tied = config.get("tie_word_embeddings", False)
    head = Linear((("model.embed_tokens.weight" if tied else "lm_head.weight", "", vocab),), head=True)
    state = p.embed("model.embed_tokens.weight", vocab, hidden, head)
    for i in range(config.size("num_hidden_layers")):
        layer = f"model.layers.{i}"

        def tensors(*names: tuple[str, int], bias: bool = False, interleaved: bool = False, at: str = layer) -> Linear:
            parts = tuple((f"{at}.{n}.weight", f"{at}.{n}.bias" if bias else "", size) for n, size in names)
            return Linear(parts, interleaved=interleaved)

        projections = tensors(
            ("self_attn.q_proj", query), ("self_attn.k_proj", kv), ("self_attn.v_proj", kv), bias=variant.qkv_bias
        )
        x = p.norm(state, hidden, f"{layer}.input_layernorm.weight", epsilon, projections)
        qkv = p.linear(x, projections, "qkv")
        norms = (f"{layer}.self_attn.q_norm.weight", f"{layer}.self_attn.k_norm.weight", epsilon)
        attended = p.attention(
            qkv, i, heads, rope=rope, window=variant.window(config, i), norms=norms if variant.head_norms else None
        )
        p.add_linear(state, attended, tensors(("self_attn.o_proj", hidden), bias=variant.output_bias))
        gate_and_up = tensors(("mlp.gate_proj", inner), ("mlp.up_proj", inner), bias=variant.mlp_bias, interleaved=True)
        x = p.norm(state, hidden, f"{layer}.post_attention_layernorm.weight", epsilon, gate_and_up)
        inside = p.gated(x, gate_and_up, activation)
        p.add_linear(state, inside, tensors(("mlp.down_proj", hidden), bias=variant.mlp_bias))
    p.logits(p.norm(state, hidden, "model.norm.weight", epsilon, head), head)
