"""Nemotron-H and Nemotron 3, class NemotronHForCausalLM: each layer is one of Mamba 2, attention, MLP and experts.

Attention has no positions. MLP and experts have no gate; their activation is the square of a ReLU. The experts of
Nemotron 3 Super read a latent of the hidden states (`moe_latent_size`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from quire.kernels.attention_heads import Heads, StateHeads
from quire.kernels.config import ModelConfig
from quire.kernels.errors import ModelError
from quire.kernels.graph.operations import (
    Attention,
    Embedding,
    ExpertRouter,
    Experts,
    FeedForward,
    Graph,
    Linear,
    Logits,
    Mixer,
    Norm,
    Residual,
    StateSpace,
)
from quire.kernels.models.decoder import activation_of, head_of
from quire.kernels.models.mamba import state_space

_MOST_LAYERS = 1000
_PATTERN = {"M": "mamba", "E": "moe", "*": "attention", "-": "mlp"}
_LAYER_TYPES = {
    "mamba": "mamba", "linear_attention": "mamba", "attention": "attention", "full_attention": "attention",
    "mlp": "mlp", "moe": "moe",
}  # fmt: skip


def build(config: ModelConfig) -> Graph:
    """Return the graph of a NemotronHForCausalLM."""
    config = config.with_defaults(layer_norm_epsilon=config.get("rms_norm_eps", 1e-5))
    config.restrict("sliding_window")
    kinds = _layer_types(config)
    config = ModelConfig({**config.fields, "num_hidden_layers": len(kinds)}, config.path)
    epsilon, residuals = config.get("layer_norm_epsilon", 1e-5), []
    builders: dict[str, Callable[[ModelConfig, str], Mixer | FeedForward | Experts]] = {
        "mamba": _mamba, "attention": _attention, "mlp": _mlp, "moe": _experts,
    }  # fmt: skip
    for layer, kind in enumerate(kinds):
        at = f"backbone.layers.{layer}"
        residuals.append(Residual(builders[kind](config, f"{at}.mixer"), Norm(f"{at}.norm.weight", epsilon)))
    embedding = Embedding("backbone.embeddings.weight", config.size("vocab_size"), config.size("hidden_size"))
    logits = Logits(Norm("backbone.norm_f.weight", epsilon), head_of(config, embedding, tied=False))
    return Graph(embedding, tuple(residuals), logits)


def _layer_types(config: ModelConfig) -> list[str]:
    """Return the kind of each layer, by a list or by a pattern of letters."""
    types = config.strings("layers_block_type") or config.strings("layer_types")
    if types:
        if not set(types) <= set(_LAYER_TYPES) or len(types) > _MOST_LAYERS:
            raise ModelError(
                f"config.json: layers_block_type is {list(types[:100])}; it must list one of "
                f"{', '.join(_LAYER_TYPES)} for each of up to {_MOST_LAYERS} layers"
            )
        return [_LAYER_TYPES[kind] for kind in types]
    pattern = config.require("hybrid_override_pattern", str)
    if not pattern or not set(pattern) <= set(_PATTERN) or len(pattern) > _MOST_LAYERS:
        raise ModelError(
            f"config.json: hybrid_override_pattern is {pattern[:100]!r}; it must have one of {' '.join(_PATTERN)} for "
            f"each of up to {_MOST_LAYERS} layers"
        )
    return [_PATTERN[letter] for letter in pattern]


def _mamba(config: ModelConfig, at: str) -> StateSpace:
    bias = config.get("use_bias", False)
    heads = StateHeads(
        config.size("n_groups", config.size("mamba_n_groups", 8)), config.size("mamba_num_heads", 128),
        config.size("ssm_state_size", 128), config.size("mamba_head_dim", 64),
    )  # fmt: skip
    layer = state_space(
        at, heads, config.size("conv_kernel", config.size("mamba_d_conv", 4)), config.size("hidden_size"),
        activation=activation_of(config, "mamba_hidden_act", "silu"), conv_bias=config.get("use_conv_bias", True),
        bias=bias, output_bias=bias,
    )  # fmt: skip
    norm = Norm(f"{at}.norm.weight", config.get("layer_norm_epsilon", 1e-5))
    least = config.positive("time_step_min", 0.001)
    return replace(layer, norm=norm, norm_groups=heads.keys, least=least)


def _attention(config: ModelConfig, at: str) -> Attention:
    query = config.size("num_attention_heads", 32)
    dim = config.size("head_dim", config.size("attention_head_dim", 128))
    heads = Heads(query, config.size("num_key_value_heads", query), dim)
    sizes = {"q": heads.query * heads.dim, "k": heads.kv * heads.dim, "v": heads.kv * heads.dim}
    layers = tuple(Linear(f"{at}.{name}_proj.weight", size) for name, size in sizes.items())
    return Attention(layers, Linear(f"{at}.o_proj.weight", config.size("hidden_size")), heads)


def _mlp(config: ModelConfig, at: str) -> FeedForward:
    return _feed_forward(config, at, config.size("intermediate_size"))


def _linear(config: ModelConfig, name: str, outputs: int) -> Linear:
    return Linear(f"{name}.weight", outputs, f"{name}.bias" if config.get("mlp_bias", False) else "")


def _feed_forward(config: ModelConfig, at: str, inner: int, outputs: int = 0) -> FeedForward:
    """Return the layer of `outputs` outputs, by default those of the model."""
    up = _linear(config, f"{at}.up_proj", inner)
    down = _linear(config, f"{at}.down_proj", outputs or config.size("hidden_size"))
    return FeedForward(up, down, activation_of(config, "mlp_hidden_act", "relu2"))


def _experts(config: ModelConfig, at: str) -> Experts:
    count, inner = config.size("n_routed_experts", 8), config.size("moe_intermediate_size", 7688)
    router = ExpertRouter(
        Linear(f"{at}.gate.weight", count), config.size("num_experts_per_tok", 2), "sigmoid",
        f"{at}.gate.e_score_correction_bias", config.get("norm_topk_prob", True),
        config.positive("routed_scaling_factor", 1.0), config.size("n_group", 1), config.size("topk_group", 1), "top2",
    )  # fmt: skip
    latent = 0 if config.fields.get("moe_latent_size") is None else config.size("moe_latent_size")
    layers = tuple(_feed_forward(config, f"{at}.experts.{number}", inner, latent) for number in range(count))
    shared = _feed_forward(config, f"{at}.shared_experts", config.size("moe_shared_expert_intermediate_size", 7688))
    if not latent:
        return Experts(router, layers, shared)
    compress = _linear(config, f"{at}.fc1_latent_proj", latent)
    expand = _linear(config, f"{at}.fc2_latent_proj", config.size("hidden_size"))
    return Experts(router, layers, shared, compress=compress, expand=expand)
