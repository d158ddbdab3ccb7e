"""Seed-OSS, class SeedOssForCausalLM (ByteDance 2025): Llama with biases of q, k and v."""

from __future__ import annotations

from quire.kernels.config import ModelConfig
from quire.kernels.graph.operations import Graph
from quire.kernels.models.decoder import Variant, build_decoder


def build(config: ModelConfig) -> Graph:
    """Return the graph of a SeedOssForCausalLM."""
    config = config.with_defaults(num_key_value_heads=8, head_dim=128, max_position_embeddings=524288)
    config.restrict("pretraining_tp", (1,))
    return build_decoder(
        config,
        Variant(
            qkv_bias=config.get("attention_bias", True),
            output_bias=config.get("attention_out_bias", False),
            mlp_bias=config.get("mlp_bias", False),
        ),
    )
