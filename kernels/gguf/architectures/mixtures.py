"""Mixtures of experts with a correction of their scores: GLM-4.5, ERNIE 4.5 and MiniMax-M2."""

from __future__ import annotations

from quire.kernels.gguf.architectures.description import (
    ATTENTION_BIAS,
    CORRECTED_EXPERT_NAMES,
    DECODER,
    DECODER_NAMES,
    HEAD_NAMES,
    HEAD_NORM_NAMES,
    LAYER,
    PARTIAL_ROTARY,
    Architecture,
    has,
    number,
    size,
    without,
)
from quire.kernels.gguf.metadata import Metadata

_SIGMOID, _SOFTMAX = 2, 1  # of expert_gating_func
_DENSE = ("blk.*.ffn_gate", "blk.*.ffn_up", "blk.*.ffn_down")


def _check_gating(metadata: Metadata, expected: int) -> None:
    if metadata.own("expert_gating_func") not in (None, expected):
        raise metadata.unsupported("expert_gating_func", f"it must be {expected}")


def _sigmoid(metadata: Metadata) -> str:
    """Return `scoring_func`."""
    _check_gating(metadata, _SIGMOID)
    return "sigmoid"


def _first_layer(metadata: Metadata) -> int:
    """Return the number of dense layers before those with experts."""
    return metadata.size("leading_dense_block_count") if metadata.own("leading_dense_block_count") else 0


GLM4_MOE = Architecture(
    "Glm4MoeForCausalLM",
    {
        **without(DECODER_NAMES, "blk.*.ffn_norm"),
        **HEAD_NORM_NAMES,
        **CORRECTED_EXPERT_NAMES,
        **HEAD_NAMES,
        "blk.*.post_attention_norm": "model.layers.*.post_attention_layernorm",
    },
    {
        **DECODER,
        **PARTIAL_ROTARY,
        **ATTENTION_BIAS,
        "use_qk_norm": has("blk.0.attn_q_norm.weight"),
        "scoring_func": _sigmoid,
        "first_k_dense_replace": _first_layer,
        "n_routed_experts": size("expert_count"),
        "n_shared_experts": size("expert_shared_count"),
        "num_experts_per_tok": size("expert_used_count"),
        "moe_intermediate_size": size("expert_feed_forward_length"),
        "routed_scaling_factor": number("expert_weights_scale", 1.0),
        "norm_topk_prob": lambda metadata: metadata.flag("expert_weights_norm", False),
        "n_group": size("expert_group_count", 1),
        "topk_group": size("expert_group_used_count", 1),
    },
    head_layer=LAYER,
)


def _shared_count(metadata: Metadata) -> int:
    """Return `moe_num_shared_experts`. The key of their size is none of the model's, but a quotient of others."""
    _check_gating(metadata, _SOFTMAX)
    metadata.own("expert_shared_feed_forward_length")
    return metadata.size("expert_shared_count") if metadata.own("expert_shared_count") else 0


ERNIE4_5_MOE = Architecture(
    "Ernie4_5_MoeForCausalLM",
    {**DECODER_NAMES, **CORRECTED_EXPERT_NAMES},
    {
        **DECODER,
        "use_bias": has("blk.0.attn_q.bias"),
        "moe_num_experts": size("expert_count"),
        "moe_k": size("expert_used_count"),
        "moe_intermediate_size": size("expert_feed_forward_length"),
        "moe_num_shared_experts": _shared_count,
        "moe_layer_start_index": _first_layer,
        "moe_layer_interval": size("interleave_moe_layer_step", 1),
    },
)


def _expert_size(metadata: Metadata) -> int:
    """Return `intermediate_size`, that of an expert."""
    metadata.own("feed_forward_length")
    return metadata.size("expert_feed_forward_length")


MINIMAX_M2 = Architecture(
    "MiniMaxM2ForCausalLM",
    {**without(DECODER_NAMES, *_DENSE), **HEAD_NORM_NAMES, **CORRECTED_EXPERT_NAMES},
    {
        **DECODER,
        **PARTIAL_ROTARY,
        "scoring_func": _sigmoid,
        "intermediate_size": _expert_size,
        "num_local_experts": size("expert_count"),
        "num_experts_per_tok": size("expert_used_count"),
    },
)
