"""Granite 4, class GraniteMoeHybridForCausalLM: Mamba 2 layers and a few with attention, experts beside an MLP.

The multipliers of Granite 3. Without `position_embedding_type` "rope" attention has no positions. The fused layers have
names of their own; models without experts have the MLP alone. GGUF files have gate and up of the MLP apart, and say so
by the field `fused_shared_mlp`.
"""

from __future__ import annotations

from dataclasses import replace

from quire.kernels.config import ModelConfig
from quire.kernels.errors import ModelError
from quire.kernels.graph.operations import Experts, FeedForward, Graph, Linear, Norm, StateSpace
from quire.kernels.models.decoder import Variant, activation_of, build_decoder, heads_of
from quire.kernels.models.experts import experts
from quire.kernels.models.mamba import mamba_heads, state_space, with_time_limits
from quire.kernels.rope import Rope

_LAYER_TYPES = {"mamba": "mamba", "linear_attention": "mamba", "attention": "attention", "full_attention": "attention"}


def build(config: ModelConfig) -> Graph:
    """Return the graph of a GraniteMoeHybridForCausalLM."""
    kinds, bias = _layer_types(config), config.get("attention_bias", False)
    rotates = config.choice("position_embedding_type", ("rope", "nope"), "nope") == "rope"
    rope = Rope.from_config(config, heads_of(config).dim) if rotates else None
    return build_decoder(
        config,
        Variant(
            qkv_bias=bias,
            output_bias=bias,
            rotary=lambda layer: rope,
            mixer=lambda config, layer: _mamba(config, layer) if kinds[layer] == "mamba" else None,
            experts=_feed_forward,
            attention_scale=config.positive("attention_multiplier", 1.0),
            embedding_scale=config.positive("embedding_multiplier", 1.0),
            residual_multiplier=config.positive("residual_multiplier", 1.0),
            logits_scale=1.0 / config.positive("logits_scaling", 1.0),
        ),
    )


def _layer_types(config: ModelConfig) -> list[str]:
    layers = config.size("num_hidden_layers")
    types = config.strings("layer_types") or config.strings("layers_block_type") or ("mamba",) * layers
    if len(types) != layers or not set(types) <= set(_LAYER_TYPES):
        raise ModelError(
            f"config.json: layer_types is {list(types)}; it must list one of {', '.join(_LAYER_TYPES)} for each of the "
            f"{layers} layers"
        )
    return [_LAYER_TYPES[kind] for kind in types]


def _mamba(config: ModelConfig, layer: int) -> StateSpace:
    at, hidden = f"model.layers.{layer}.mamba", config.size("hidden_size")
    heads, bias = mamba_heads(config, config.size("mamba_expand", 2) * hidden), config.get("mamba_proj_bias", False)
    mixer = state_space(
        at, heads, config.size("mamba_d_conv", 4), hidden, activation=activation_of(config, "hidden_act", "silu"),
        conv_bias=config.get("mamba_conv_bias", True), bias=bias, output_bias=bias,
    )  # fmt: skip
    norm = Norm(f"{at}.norm.weight", config.get("rms_norm_eps", 1e-6))
    return with_time_limits(replace(mixer, norm=norm, norm_groups=heads.keys), config.fields.get("time_step_limit"))


def _feed_forward(config: ModelConfig, layer: int) -> FeedForward | Experts:
    """Return the experts of a layer with the shared MLP, or this alone."""
    at, inner = f"model.layers.{layer}.shared_mlp", config.size("shared_intermediate_size", 1024)
    activation = activation_of(config, "hidden_act", "silu")
    gate, up = (
        Linear(f"{at}.input_linear.weight", inner, first=first, tensor_outputs=2 * inner) for first in (0, inner)
    )
    if not config.get("fused_shared_mlp", True):
        gate, up = (Linear(f"{at}.{name}_linear.weight", inner) for name in ("gate", "up"))
    shared = FeedForward(up, Linear(f"{at}.output_linear.weight", config.size("hidden_size")), activation, gate)
    count = config.get("num_local_experts", 8)
    if count == 0:
        return shared
    config = config.with_defaults(num_experts_per_tok=2, num_local_experts=8)
    routed = experts(
        config, layer, config.size("num_local_experts"), config.size("intermediate_size"), activation, normalize=True
    )
    return replace(routed, shared=shared)
