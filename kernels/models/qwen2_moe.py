"""Qwen1.5-MoE and Qwen2-MoE, class Qwen2MoeForCausalLM: Qwen2 with experts and a shared expert with a gate."""

from __future__ import annotations

from quire.kernels.config import ModelConfig
from quire.kernels.graph.operations import Experts, Graph
from quire.kernels.models.decoder import Variant, activation_of, build_decoder, sliding_layers, window_of
from quire.kernels.models.experts import experts_beside_one, is_sparse


def build(config: ModelConfig) -> Graph:
    """Return the graph of a Qwen2MoeForCausalLM."""
    config = config.with_defaults(
        num_key_value_heads=16, sliding_window=4096, max_window_layers=28, num_experts=60, num_experts_per_tok=4,
        moe_intermediate_size=1408, shared_expert_intermediate_size=5632, max_position_embeddings=32768,
    )  # fmt: skip
    bias = config.get("qkv_bias", True)
    return build_decoder(config, Variant(qkv_bias=bias, window=_window, experts=_experts))


def _window(config: ModelConfig, layer: int) -> int:
    """Return the window of a layer, which applies by `layer_types`, or else in each other one of the first layers."""
    if not config.get("use_sliding_window", False):
        return 0
    sliding = sliding_layers(config, 2)[layer]
    if not config.strings("layer_types"):
        sliding = sliding and layer < config.get("max_window_layers", 0)
    return window_of(config) if sliding else 0


def _experts(config: ModelConfig, layer: int) -> Experts | None:
    if not is_sparse(config, layer):
        return None
    return experts_beside_one(config, layer, activation_of(config, "hidden_act", "silu"), normalize=False)
