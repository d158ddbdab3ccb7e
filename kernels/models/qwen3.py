"""Qwen3 dense models, class Qwen3ForCausalLM: Qwen2 without QKV biases, with RMSNorms of query and key heads."""

from __future__ import annotations

from quire.kernels.config import ModelConfig
from quire.kernels.models.decoder import Variant, build_decoder
from quire.kernels.models.qwen2 import layer_window
from quire.kernels.plan import PlanBuilder


def build(p: PlanBuilder, config: ModelConfig) -> None:
    """The plan of a Qwen3ForCausalLM."""
    bias = config.get("attention_bias", False)
    if "head_dim" not in config.fields:
        config.fields["head_dim"] = 128  # the default of the class, whatever the hidden size
    build_decoder(p, config, Variant(qkv_bias=bias, output_bias=bias, head_norms=True, window=layer_window))
