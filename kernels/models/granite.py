"""Granite 3 dense models, class GraniteForCausalLM: Llama with multipliers."""

from __future__ import annotations

from quire.kernels.config import ModelConfig
from quire.kernels.graph.operations import Graph
from quire.kernels.models.decoder import Variant, build_decoder


def build(config: ModelConfig) -> Graph:
    """Return the graph of a GraniteForCausalLM."""
    bias = config.get("attention_bias", False)
    return build_decoder(
        config,
        Variant(
            qkv_bias=bias,
            output_bias=bias,
            mlp_bias=config.get("mlp_bias", False),
            attention_scale=config.positive("attention_multiplier", 1.0),
            embedding_scale=config.positive("embedding_multiplier", 1.0),
            residual_multiplier=config.positive("residual_multiplier", 1.0),
            logits_scale=1.0 / config.positive("logits_scaling", 1.0),
        ),
    )
