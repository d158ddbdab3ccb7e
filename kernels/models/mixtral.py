"""Mixtral, class MixtralForCausalLM (Jiang et al. 2024): Mistral with experts."""

from __future__ import annotations

from quire.kernels.config import ModelConfig
from quire.kernels.graph.operations import Experts, Graph
from quire.kernels.models.decoder import Variant, activation_of, build_decoder, window_of
from quire.kernels.models.experts import experts


def build(config: ModelConfig) -> Graph:
    """Return the graph of a MixtralForCausalLM."""
    config = config.with_defaults(
        num_key_value_heads=8, num_local_experts=8, num_experts_per_tok=2, rms_norm_eps=1e-5, rope_theta=1e6,
        max_position_embeddings=131072,
    )  # fmt: skip
    return build_decoder(config, Variant(window=lambda config, layer: window_of(config), experts=_experts))


def _experts(config: ModelConfig, layer: int) -> Experts:
    count, inner = config.size("num_local_experts"), config.size("intermediate_size")
    return experts(config, layer, count, inner, activation_of(config, "hidden_act", "silu"), normalize=True)
