"""Llama 2, 3, 3.1, 3.2, SmolLM and others of class LlamaForCausalLM (Touvron et al. 2023)."""

from __future__ import annotations

from quire.kernels.config import ModelConfig
from quire.kernels.graph.operations import Graph
from quire.kernels.models.decoder import Variant, build_decoder


def build(config: ModelConfig) -> Graph:
    """Return the graph of a LlamaForCausalLM."""
    config.restrict("pretraining_tp", (1,))
    bias = config.get("attention_bias", False)
    return build_decoder(config, Variant(qkv_bias=bias, output_bias=bias, mlp_bias=config.get("mlp_bias", False)))
