"""MiniMax-M2, class MiniMaxM2ForCausalLM (MiniMax 2025): experts chosen by sigmoid, joint norms of q and k heads."""

from __future__ import annotations

from quire.kernels.config import ModelConfig
from quire.kernels.graph.operations import Experts, Graph
from quire.kernels.models.decoder import Variant, activation_of, build_decoder, heads_of
from quire.kernels.models.experts import experts
from quire.kernels.rope import Rope


def build(config: ModelConfig) -> Graph:
    """Return the graph of a MiniMaxM2ForCausalLM. Layers for multi-token prediction are not loaded."""
    config = config.with_defaults(
        num_key_value_heads=8, head_dim=128, max_position_embeddings=196608, rope_theta=5e6, num_experts_per_tok=8,
        num_local_experts=256,
    )  # fmt: skip
    config.restrict("use_qk_norm", (True,))
    config.restrict("qk_norm_type", ("per_layer",))
    config.restrict("scoring_func", ("sigmoid",))
    config.restrict("use_routing_bias", (True,))
    config.restrict("shared_intermediate_size", (0,))
    config.restrict("attn_type_list", ([1] * config.size("num_hidden_layers"),))
    rope = _rope(config)
    return build_decoder(
        config, Variant(head_norms=True, joint_head_norms=True, rotary=lambda layer: rope, experts=_experts)
    )


def _rope(config: ModelConfig) -> Rope:
    """Return the rotary embedding; files of before have `rotary_dim`, the elements of a head that are rotated."""
    dim = heads_of(config).dim
    if config.fields.get("rotary_dim") is not None:
        config = config.with_defaults(partial_rotary_factor=config.size("rotary_dim") / dim)
    return Rope.from_config(config, dim, partial=True)


def _experts(config: ModelConfig, layer: int) -> Experts:
    return experts(
        config, layer, config.size("num_local_experts"), config.size("intermediate_size"),
        activation_of(config, "hidden_act", "silu"), scoring="sigmoid", normalize=True,
        correction=f"model.layers.{layer}.mlp.gate.e_score_correction_bias",
    )  # fmt: skip
