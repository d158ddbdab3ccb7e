"""Qwen3-MoE, class Qwen3MoeForCausalLM: Qwen3 with experts."""

from __future__ import annotations

from quire.kernels.config import ModelConfig
from quire.kernels.graph.operations import Experts, Graph
from quire.kernels.models.decoder import Variant, activation_of, build_decoder, window_of
from quire.kernels.models.experts import experts, is_sparse


def build(config: ModelConfig) -> Graph:
    """Return the graph of a Qwen3MoeForCausalLM."""
    config = config.with_defaults(
        num_key_value_heads=4, sliding_window=4096, num_experts_per_tok=8, moe_intermediate_size=768,
        max_position_embeddings=32768,
    )  # fmt: skip
    bias = config.get("attention_bias", False)
    variant = Variant(qkv_bias=bias, output_bias=bias, head_norms=True, window=_window, experts=_experts)
    return build_decoder(config, variant)


def _window(config: ModelConfig, layer: int) -> int:
    return window_of(config) if config.get("use_sliding_window", False) else 0


def _experts(config: ModelConfig, layer: int) -> Experts | None:
    if not is_sparse(config, layer):
        return None
    count = config.size("num_experts", config.size("num_local_experts", 128))  # transformers 5 writes the second
    return experts(
        config, layer, count, config.size("moe_intermediate_size"), activation_of(config, "hidden_act", "silu"),
        normalize=config.get("norm_topk_prob", False),
    )  # fmt: skip
