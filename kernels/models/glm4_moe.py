"""GLM-4.5, 4.6 and 4.7, class Glm4MoeForCausalLM: experts as in DeepSeek-V3, and a partial rotary embedding."""

from __future__ import annotations

from dataclasses import replace

from quire.kernels.config import ModelConfig
from quire.kernels.graph.operations import Experts, Graph
from quire.kernels.models.decoder import Variant, activation_of, build_decoder, heads_of
from quire.kernels.models.experts import experts, feed_forward
from quire.kernels.rope import Rope


def build(config: ModelConfig) -> Graph:
    """Return the graph of a Glm4MoeForCausalLM. The layer for multi-token prediction is that of mtp.py."""
    config = config.with_defaults(
        num_key_value_heads=8, rms_norm_eps=1e-5, max_position_embeddings=131072, partial_rotary_factor=0.5,
        n_routed_experts=128, num_experts_per_tok=8, moe_intermediate_size=1408, n_shared_experts=1,
        routed_scaling_factor=1.0, n_group=1, topk_group=1, first_k_dense_replace=1,
    )  # fmt: skip
    config.restrict("scoring_func", ("sigmoid",))
    config.restrict("topk_method", ("noaux_tc",))
    rope = Rope.from_config(config, heads_of(config).dim, partial=True)
    return build_decoder(
        config,
        Variant(
            qkv_bias=config.get("attention_bias", False),
            head_norms=config.get("use_qk_norm", False),
            rotary=lambda layer: rope,
            experts=_experts,
        ),
    )


def _experts(config: ModelConfig, layer: int) -> Experts | None:
    if layer < config.get("first_k_dense_replace", 1):
        return None
    inner, activation = config.size("moe_intermediate_size"), activation_of(config, "hidden_act", "silu")
    mlp, shared = f"model.layers.{layer}.mlp", inner * config.size("n_shared_experts")
    block = experts(
        config, layer, config.size("n_routed_experts"), inner, activation, scoring="sigmoid",
        correction=f"{mlp}.gate.e_score_correction_bias", normalize=config.get("norm_topk_prob", True),
        scale=config.positive("routed_scaling_factor"), groups=config.size("n_group"),
        top_groups=config.size("topk_group"), group_score="top2",
    )  # fmt: skip
    return replace(block, shared=feed_forward(f"{mlp}.shared_experts", config.size("hidden_size"), shared, activation))
