"""Qwen3-Next and Qwen3.5: three of four layers have a gated delta rule in place of attention, the others a gate.

Classes Qwen3NextForCausalLM, Qwen3_5ForCausalLM, Qwen3_5MoeForCausalLM, and the text parts of
Qwen3_5ForConditionalGeneration and Qwen3_5MoeForConditionalGeneration. Norms add 1 to their weights; a quarter of each
head is rotated. Qwen3.5 has a tensor for each projection, Qwen3-Next two, in which those of a key head lie together.

GGUF files differ, and say so by fields that config.json has for them alone: `joint_projections` is false where the
projections of Qwen3-Next are those of Qwen3.5, but for the rates, and `interleaved_value_heads` is true where each
key head has every n-th value head, of n key heads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from quire.kernels.attention_heads import StateHeads
from quire.kernels.config import ModelConfig
from quire.kernels.errors import ModelError
from quire.kernels.graph.operations import Convolution, DeltaNet, Experts, Graph, Linear, Norm
from quire.kernels.models.decoder import Variant, activation_of, build_decoder, heads_of
from quire.kernels.models.experts import experts_beside_one, is_sparse
from quire.kernels.rope import Rope

_LAYER_TYPES = ("linear_attention", "full_attention")
_NORM_OFFSET = 1.0

_Projections = Callable[[str, StateHeads], tuple[tuple[Linear, ...], tuple[Linear, ...], int]]


def build_next(config: ModelConfig) -> Graph:
    """Return the graph of a Qwen3NextForCausalLM."""
    config = config.with_defaults(
        num_experts=512, num_experts_per_tok=10, moe_intermediate_size=512, shared_expert_intermediate_size=512,
        intermediate_size=5632, num_key_value_heads=2, norm_topk_prob=True,
    )  # fmt: skip
    projections = _joint_projections if config.get("joint_projections", True) else _joint_rates
    return _build(config, projections, lambda config, layer: _experts(config, layer, is_sparse(config, layer)))


def build(config: ModelConfig) -> Graph:
    """Return the graph of a Qwen3_5ForCausalLM."""
    return _build(config.with_defaults(num_key_value_heads=4), _projections, lambda config, layer: None)


def build_moe(config: ModelConfig) -> Graph:
    """Return the graph of a Qwen3_5MoeForCausalLM."""
    config = config.with_defaults(
        num_experts=256, num_experts_per_tok=8, moe_intermediate_size=512, shared_expert_intermediate_size=512,
        intermediate_size=512, num_key_value_heads=2,
    )  # fmt: skip
    return _build(config, _projections, lambda config, layer: _experts(config, layer, True))


def _build(
    config: ModelConfig, projections: _Projections, experts_of: Callable[[ModelConfig, int], Experts | None]
) -> Graph:
    config = config.with_defaults(
        head_dim=256, max_position_embeddings=32768, partial_rotary_factor=0.25, linear_conv_kernel_dim=4,
        linear_key_head_dim=128, linear_value_head_dim=128, linear_num_key_heads=16, linear_num_value_heads=32,
    )  # fmt: skip
    linear = [kind == "linear_attention" for kind in _layer_types(config)]
    rope = Rope.from_config(config, heads_of(config).dim, partial=True)
    bias = config.get("attention_bias", False)
    return build_decoder(
        config,
        Variant(
            qkv_bias=bias,
            output_bias=bias,
            head_norms=True,
            gated=True,
            rotary=lambda layer: rope,
            mixer=lambda config, layer: _delta_net(config, layer, projections) if linear[layer] else None,
            experts=experts_of,
            norm_offset=_NORM_OFFSET,
        ),
    )


def _layer_types(config: ModelConfig) -> list[str]:
    """Return the kind of each layer, by `layer_types` or by the interval of those with attention."""
    layers, types = config.size("num_hidden_layers"), list(config.strings("layer_types"))
    if not types:
        interval = config.size("full_attention_interval", 4)
        types = [_LAYER_TYPES[(layer + 1) % interval == 0] for layer in range(layers)]
    if len(types) != layers or not set(types) <= set(_LAYER_TYPES):
        raise ModelError(
            f"config.json: {config.path}layer_types is {types}; it must list one of {', '.join(_LAYER_TYPES)} for each "
            f"of the {layers} layers"
        )
    return types


def _delta_net(config: ModelConfig, layer: int, projections: _Projections) -> DeltaNet:
    at = f"model.layers.{layer}.linear_attn"
    heads = StateHeads(
        config.size("linear_num_key_heads"), config.size("linear_num_value_heads"), config.size("linear_key_head_dim"),
        config.size("linear_value_head_dim"), config.get("interleaved_value_heads", False),
    )  # fmt: skip
    if heads.values % heads.keys:
        raise ModelError(
            f"config.json: {config.path}linear_num_value_heads ({heads.values}) must be a multiple of "
            f"linear_num_key_heads ({heads.keys})"
        )
    layers, rates, group = projections(at, heads)
    return DeltaNet(
        layers, rates, group,
        Convolution(
            f"{at}.conv1d.weight", heads.channels, config.size("linear_conv_kernel_dim"),
            activation=activation_of(config, "hidden_act", "silu"),
        ),
        heads, f"{at}.A_log", f"{at}.dt_bias", Norm(f"{at}.norm.weight", config.get("rms_norm_eps", 1e-6)),
        Linear(f"{at}.out_proj.weight", config.size("hidden_size")),
    )  # fmt: skip


def _projections(at: str, heads: StateHeads) -> tuple[tuple[Linear, ...], tuple[Linear, ...], int]:
    """Return the projections of a layer of Qwen3.5, those of the rates, and no group of heads."""
    layers = Linear(f"{at}.in_proj_qkv.weight", heads.channels), Linear(f"{at}.in_proj_z.weight", heads.value_columns)
    return layers, tuple(Linear(f"{at}.in_proj_{rate}.weight", heads.values) for rate in "ba"), 0


def _joint_rates(at: str, heads: StateHeads) -> tuple[tuple[Linear, ...], tuple[Linear, ...], int]:
    """Return the projections of a layer of Qwen3.5 and the rates of one of Qwen3-Next."""
    return _projections(at, heads)[0], *_joint_projections(at, heads)[1:]


def _joint_projections(at: str, heads: StateHeads) -> tuple[tuple[Linear, ...], tuple[Linear, ...], int]:
    """Return those of a layer of Qwen3-Next: a key head's query, key, values and gates lie together, and its rates."""
    value = heads.group * heads.value
    sizes = heads.key, heads.key, value, value
    whole = Linear(f"{at}.in_proj_qkvz.weight", 0, tensor_outputs=heads.channels + heads.value_columns)
    layers = tuple(
        replace(whole, outputs=size, first=head * sum(sizes) + sum(sizes[:part]))
        for part, size in enumerate(sizes)
        for head in range(heads.keys)
    )
    return layers, (Linear(f"{at}.in_proj_ba.weight", 2 * heads.values),), heads.group


def _experts(config: ModelConfig, layer: int, sparse: bool) -> Experts | None:
    if not sparse:
        return None
    return experts_beside_one(config, layer, activation_of(config, "hidden_act", "silu"), normalize=True)
