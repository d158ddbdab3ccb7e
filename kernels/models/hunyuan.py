"""Hunyuan dense models, class HunYuanDenseV1ForCausalLM (Tencent 2025): Llama with norms of rotated q and k heads."""

from __future__ import annotations

from dataclasses import replace

from quire.kernels.config import ModelConfig
from quire.kernels.graph.operations import Graph
from quire.kernels.models.decoder import Variant, build_decoder, heads_of
from quire.kernels.rope import Rope


def build(config: ModelConfig) -> Graph:
    """Return the graph of a HunYuanDenseV1ForCausalLM."""
    config = config.with_defaults(rms_norm_eps=1e-5)
    config.restrict("use_qk_norm", (True,))
    config.restrict("use_cla", (False,))
    config.restrict("mlp_bias", (False,))
    config.restrict("pretraining_tp", (1,))
    bias, rope = config.get("attention_bias", False), _rope(config)
    return build_decoder(
        config,
        Variant(
            qkv_bias=bias,
            output_bias=bias,
            head_norms=True,
            head_norm_names=("query_layernorm", "key_layernorm"),
            head_norms_after_rotation=True,
            rotary=lambda layer: rope,
        ),
    )


def _rope(config: ModelConfig) -> Rope:
    """Return the rotary embedding. A `dynamic` one with an `alpha` has a larger base, the same for all lengths."""
    rope = Rope.from_config(config, heads_of(config).dim)
    if rope.kind != "dynamic" or not rope.scaling.get("alpha"):
        return rope
    return replace(rope, kind="default", theta=rope.theta * rope.number("alpha") ** (rope.dim / (rope.dim - 2)))
