"""Qwen3 dense models, class Qwen3ForCausalLM: Qwen2 without QKV biases, with RMSNorms of query and key heads."""

from __future__ import annotations

from quire.kernels.config import ModelConfig
from quire.kernels.models.decoder import Variant, build_decoder
from quire.kernels.models.qwen2 import layer_window
from quire.kernels.plan import PlanBuilder


def build(p: PlanBuilder, config: ModelConfig) -> None:
    """The plan of a Qwen3ForCausalLM."""
    config = config.with_defaults(head_dim=128, num_key_value_heads=32, sliding_window=4096, max_window_layers=28)
    bias = config.get("attention_bias", False)
    build_decoder(p, config, Variant(qkv_bias=bias, output_bias=bias, head_norms=True, window=layer_window))
