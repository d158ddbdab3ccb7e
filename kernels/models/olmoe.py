"""OLMoE, class OlmoeForCausalLM (Muennighoff et al. 2024): experts, and norms of all query and all key heads."""

from __future__ import annotations

from quire.kernels.config import ModelConfig
from quire.kernels.graph.operations import Experts, Graph
from quire.kernels.models.decoder import Variant, activation_of, build_decoder
from quire.kernels.models.experts import experts


def build(config: ModelConfig) -> Graph:
    """Return the graph of an OlmoeForCausalLM."""
    config = config.with_defaults(
        rms_norm_eps=1e-5, num_experts=64, num_experts_per_tok=8, max_position_embeddings=4096
    )
    config.restrict("clip_qkv")
    bias = config.get("attention_bias", False)
    variant = Variant(qkv_bias=bias, output_bias=bias, head_norms=True, joint_head_norms=True, experts=_experts)
    return build_decoder(config, variant)


def _experts(config: ModelConfig, layer: int) -> Experts:
    return experts(
        config, layer, config.size("num_experts"), config.size("intermediate_size"),
        activation_of(config, "hidden_act", "silu"), normalize=config.get("norm_topk_prob", False),
    )  # fmt: skip
