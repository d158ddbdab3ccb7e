"""OLMo 2, class Olmo2ForCausalLM (OLMo Team 2024): norms after blocks only, and of all query and all key heads."""

from __future__ import annotations

from quire.kernels.config import ModelConfig
from quire.kernels.graph.operations import Graph
from quire.kernels.models.decoder import NormNames, Variant, build_decoder


def build(config: ModelConfig) -> Graph:
    """Return the graph of an Olmo2ForCausalLM."""
    config = config.with_defaults(rms_norm_eps=1e-5)
    bias = config.get("attention_bias", False)
    return build_decoder(
        config,
        Variant(
            qkv_bias=bias,
            output_bias=bias,
            head_norms=True,
            joint_head_norms=True,
            attention_norms=NormNames(after="post_attention_layernorm"),
            mlp_norms=NormNames(after="post_feedforward_layernorm"),
        ),
    )
