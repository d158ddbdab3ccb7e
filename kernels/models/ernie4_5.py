"""ERNIE 4.5, classes Ernie4_5ForCausalLM and Ernie4_5_MoeForCausalLM (Baidu 2025): Llama that rotates neighbours.

Its experts are chosen by a softmax with a correction, and some are shared.
"""

from __future__ import annotations

from dataclasses import replace

from quire.kernels.config import ModelConfig
from quire.kernels.graph.operations import Experts, Graph
from quire.kernels.models.decoder import Variant, activation_of, build_decoder, heads_of
from quire.kernels.models.experts import experts, feed_forward
from quire.kernels.rope import Rope


def build(config: ModelConfig) -> Graph:
    """Return the graph of an Ernie4_5ForCausalLM."""
    config = config.with_defaults(num_key_value_heads=2, head_dim=128, **_DEFAULTS)
    return build_decoder(config, _variant(config))


def build_moe(config: ModelConfig) -> Graph:
    """Return the graph of an Ernie4_5_MoeForCausalLM. Layers for multi-token prediction are not loaded."""
    config = config.with_defaults(
        num_key_value_heads=4, moe_num_experts=64, moe_k=6, moe_intermediate_size=1536, moe_num_shared_experts=2,
        moe_layer_start_index=1, moe_layer_end_index=-1, moe_layer_interval=1, **_DEFAULTS,
    )  # fmt: skip
    config.restrict("use_bias", (False,))  # of experts, and of the logits
    config.restrict("moe_gate", ("topk",))
    config.restrict("moe_use_aux_free", (True,))  # with a correction
    config = ModelConfig({**config.fields, "num_experts_per_tok": config.size("moe_k")}, config.path)
    return build_decoder(config, replace(_variant(config), experts=_experts))


_DEFAULTS = {
    "rms_norm_eps": 1e-5, "rope_theta": 5e5, "max_position_embeddings": 131072, "tie_word_embeddings": True,
}  # fmt: skip


def _variant(config: ModelConfig) -> Variant:
    config.restrict("compression_ratio", (1,))  # of positions
    rope = replace(Rope.from_config(config, heads_of(config).dim), interleaved=True)
    bias = config.get("use_bias", False)
    return Variant(qkv_bias=bias, output_bias=bias, mlp_bias=bias, rotary=lambda layer: rope)


def _experts(config: ModelConfig, layer: int) -> Experts | None:
    end, last = config.get("moe_layer_end_index", -1), config.size("num_hidden_layers") - 1
    in_range = config.get("moe_layer_start_index", 1) <= layer <= (last if end == -1 else end)
    if not in_range or (layer + 1) % config.size("moe_layer_interval"):
        return None
    inner, activation = config.size("moe_intermediate_size"), activation_of(config, "hidden_act", "silu")
    mlp, shared = f"model.layers.{layer}.mlp", config.get("moe_num_shared_experts", 2)
    block = experts(
        config, layer, config.size("moe_num_experts"), inner, activation, normalize=True,
        correction=f"{mlp}.gate.e_score_correction_bias", least_sum=config.positive("moe_norm_min", 1e-12),
    )  # fmt: skip
    if not shared:
        return block
    size = inner * config.size("moe_num_shared_experts")
    return replace(block, shared=feed_forward(f"{mlp}.shared_experts", config.size("hidden_size"), size, activation))
