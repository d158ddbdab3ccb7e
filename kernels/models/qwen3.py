"""Qwen3 dense models, class Qwen3ForCausalLM: Qwen2 without QKV biases, with RMSNorms of query and key heads."""

from __future__ import annotations

from quire.kernels.config import ModelConfig
from quire.kernels.graph.operations import Graph
from quire.kernels.models.decoder import Variant, build_decoder
from quire.kernels.models.qwen2 import layer_window


def build(config: ModelConfig) -> Graph:
    """Return the graph of a Qwen3ForCausalLM."""
    config = config.with_defaults(head_dim=128, num_key_value_heads=32, sliding_window=4096, max_window_layers=28)
    bias = config.get("attention_bias", False)
    return build_decoder(config, Variant(qkv_bias=bias, output_bias=bias, head_norms=True, window=layer_window))
