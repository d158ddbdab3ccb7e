"""GLM-4-0414, class Glm4ForCausalLM: norms before and after blocks, a partial rotary embedding of neighbours."""

from __future__ import annotations

from dataclasses import replace

from quire.kernels.config import ModelConfig
from quire.kernels.graph.operations import Graph
from quire.kernels.models.decoder import NormNames, Variant, build_decoder, heads_of
from quire.kernels.rope import Rope


def build(config: ModelConfig) -> Graph:
    """Return the graph of a Glm4ForCausalLM."""
    config = config.with_defaults(
        num_key_value_heads=2, head_dim=128, max_position_embeddings=131072, rms_norm_eps=1.5625e-07,
        partial_rotary_factor=0.5,
    )  # fmt: skip
    rope = replace(Rope.from_config(config, heads_of(config).dim, partial=True), interleaved=True)
    return build_decoder(
        config,
        Variant(
            qkv_bias=config.get("attention_bias", True),
            fused_gate_up=True,
            rotary=lambda layer: rope,
            attention_norms=NormNames("input_layernorm", "post_self_attn_layernorm"),
            mlp_norms=NormNames("post_attention_layernorm", "post_mlp_layernorm"),
        ),
    )
