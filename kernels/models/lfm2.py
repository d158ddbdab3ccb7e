"""LFM2 and LFM2-MoE, classes Lfm2ForCausalLM and Lfm2MoeForCausalLM (Liquid AI 2025): short convolutions, attention.

The convolutions, three tokens long, take the place of attention in most layers. Norms of q and k heads; tensors have
names of their own.
"""

from __future__ import annotations

from collections.abc import Callable

from quire.kernels.config import ModelConfig
from quire.kernels.errors import ModelError
from quire.kernels.graph.operations import (
    Attention,
    Convolution,
    Embedding,
    Experts,
    FeedForward,
    Graph,
    HeadNorms,
    Linear,
    Logits,
    Norm,
    Residual,
    ShortConvolution,
)
from quire.kernels.models.decoder import head_of, heads_of
from quire.kernels.models.experts import experts
from quire.kernels.rope import Rope

_THETA = 1e6
_LAYER_TYPES = ("conv", "full_attention")


def build(config: ModelConfig) -> Graph:
    """Return the graph of an Lfm2ForCausalLM."""
    config = _with_defaults(config, num_key_value_heads=8)
    inner = _inner(config)
    return _build(config, lambda layer: _feed_forward(f"model.layers.{layer}.feed_forward", config, inner))


def build_moe(config: ModelConfig) -> Graph:
    """Return the graph of an Lfm2MoeForCausalLM."""
    config = _with_defaults(config, num_key_value_heads=8, num_experts=32, num_experts_per_tok=4)
    dense, inner = config.get("num_dense_layers", 2), config.size("intermediate_size", 7168)
    expert_inner = config.size("moe_intermediate_size", 1792)

    def block(layer: int) -> FeedForward | Experts:
        at = f"model.layers.{layer}.feed_forward"
        if layer < dense:
            return _feed_forward(at, config, inner)
        return experts(
            config, layer, config.size("num_experts"), expert_inner, "silu", scoring="sigmoid",
            correction=f"{at}.expert_bias" if config.get("use_expert_bias", True) else "",
            normalize=config.get("norm_topk_prob", True), scale=config.get("routed_scaling_factor", 1.0),
        )  # fmt: skip

    return _build(config, block)


def _with_defaults(config: ModelConfig, **defaults: int) -> ModelConfig:
    tied = config.fields.get("tie_embedding", config.fields.get("tie_word_embeddings"))
    fields = {**config.fields, "tie_word_embeddings": True if tied is None else tied}
    return ModelConfig(fields, config.path).with_defaults(rope_theta=_THETA, max_position_embeddings=128000, **defaults)


def _build(config: ModelConfig, feed_forward: Callable[[int], FeedForward | Experts]) -> Graph:
    epsilon = config.get("norm_eps", 1e-5)
    rope = Rope.from_config(config, heads_of(config).dim)
    residuals = []
    for layer, kind in enumerate(_layer_types(config)):
        at = f"model.layers.{layer}"
        mixer = _convolution(config, at) if kind == "conv" else _attention(config, at, rope, epsilon)
        residuals.append(Residual(mixer, Norm(f"{at}.operator_norm.weight", epsilon)))
        residuals.append(Residual(feed_forward(layer), Norm(f"{at}.ffn_norm.weight", epsilon)))
    embedding = Embedding("model.embed_tokens.weight", config.size("vocab_size"), config.size("hidden_size"))
    logits = Logits(Norm("model.embedding_norm.weight", epsilon), head_of(config, embedding, tied=True))
    return Graph(embedding, tuple(residuals), logits)


def _layer_types(config: ModelConfig) -> list[str]:
    """Return the kind of each layer, by `layer_types` or by the numbers of those with attention."""
    layers, types = config.size("num_hidden_layers"), list(config.strings("layer_types"))
    if not types:
        full = config.fields.get("full_attn_idxs")
        full = range(layers) if full is None else full
        if not isinstance(full, list | range):
            raise ModelError(f"config.json: full_attn_idxs is {full!r}; it must be a list of layers' numbers")
        types = ["full_attention" if layer in full else "conv" for layer in range(layers)]
    if len(types) != layers or not set(types) <= set(_LAYER_TYPES):
        raise ModelError(
            f"config.json: layer_types is {types}; it must list one of {', '.join(_LAYER_TYPES)} for each of the "
            f"{layers} layers"
        )
    return types


def _convolution(config: ModelConfig, at: str) -> ShortConvolution:
    hidden, bias = config.size("hidden_size"), config.get("conv_bias", False)

    def linear(name: str, outputs: int) -> Linear:
        return Linear(f"{at}.conv.{name}.weight", outputs, f"{at}.conv.{name}.bias" if bias else "")

    convolution = Convolution(
        f"{at}.conv.conv.weight", hidden, config.size("conv_L_cache", 3), f"{at}.conv.conv.bias" if bias else ""
    )
    return ShortConvolution(linear("in_proj", 3 * hidden), convolution, linear("out_proj", hidden))


def _attention(config: ModelConfig, at: str, rope: Rope, epsilon: float) -> Attention:
    heads, at = heads_of(config), f"{at}.self_attn"
    sizes = {"q": heads.query * heads.dim, "k": heads.kv * heads.dim, "v": heads.kv * heads.dim}
    norms = HeadNorms(f"{at}.q_layernorm.weight", f"{at}.k_layernorm.weight", epsilon)
    return Attention(
        tuple(Linear(f"{at}.{name}_proj.weight", size) for name, size in sizes.items()),
        Linear(f"{at}.out_proj.weight", config.size("hidden_size")), heads, rotary=rope, head_norms=norms,
    )  # fmt: skip


def _inner(config: ModelConfig) -> int:
    """Return the width of feed-forward layers, which the config has before an adjustment."""
    inner = config.size("block_ff_dim", config.size("intermediate_size", 12288))
    if not config.get("block_auto_adjust_ff_dim", True):
        return inner
    inner = 2 * inner // 3
    if config.fields.get("block_ffn_dim_multiplier", 1.0) is None:
        return inner
    multiple = config.size("block_multiple_of", 256)
    return -(-int(config.positive("block_ffn_dim_multiplier", 1.0) * inner) // multiple) * multiple


def _feed_forward(at: str, config: ModelConfig, inner: int) -> FeedForward:
    return FeedForward(
        Linear(f"{at}.w3.weight", inner), Linear(f"{at}.w2.weight", config.size("hidden_size")), "silu",
        Linear(f"{at}.w1.weight", inner),
    )  # fmt: skip
