"""DeepSeek-V2, V2-Lite, V3, R1 and GLM-4.7-Flash: their attention keeps one latent for all heads.

The converter writes the sizes of latent heads under names of its own (`_mla`). Files from before April 2025 have those
of expanded heads, and one tensor for keys and values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from quire.kernels.gguf.architectures.description import (
    CORRECTED_EXPERT_NAMES,
    DECODER,
    DECODER_NAMES,
    HEAD_NAMES,
    LAYER,
    Architecture,
    Field,
    Names,
    has_any,
    heads,
    number,
    rope_scaling,
    size,
    without,
)
from quire.kernels.gguf.metadata import Metadata

_ATTENTION = "model.layers.*.self_attn"
_NAMES: Names = {
    **without(DECODER_NAMES, "blk.*.attn_k", "blk.*.attn_v", "blk.*.attn_qkv"),
    **CORRECTED_EXPERT_NAMES,
    **HEAD_NAMES,
    "blk.*.attn_q_a": f"{_ATTENTION}.q_a_proj",
    "blk.*.attn_q_a_norm": f"{_ATTENTION}.q_a_layernorm",
    "blk.*.attn_q_b": f"{_ATTENTION}.q_b_proj",
    "blk.*.attn_kv_a_mqa": f"{_ATTENTION}.kv_a_proj_with_mqa",
    "blk.*.attn_kv_a_norm": f"{_ATTENTION}.kv_a_layernorm",
    "blk.*.attn_kv_b": f"{_ATTENTION}.kv_b_proj",
    "blk.*.attn_k_b": f"{_ATTENTION}.k_b_proj",
    "blk.*.attn_v_b": f"{_ATTENTION}.v_b_proj",
}
_SIGMOID = 2  # of expert_gating_func


def _optional_size(key: str) -> Field:
    """Return the field that is the size in `key`, null where it is missing or 0."""
    return lambda metadata: metadata.size(key) if metadata.own(key) else None


def _head_size(kind: str) -> Callable[[Metadata], int]:
    """Return the field with the size of an expanded head of keys or values."""

    def expanded(metadata: Metadata) -> int:
        metadata.own(f"attention.{kind}_length")
        key = f"attention.{kind}_length_mla"
        return metadata.size(key if metadata.own(key) is not None else f"attention.{kind}_length")

    return expanded


def _nope_size(metadata: Metadata) -> int:
    """Return `qk_nope_head_dim`, what of a head's keys is not rotated."""
    return _head_size("key")(metadata) - metadata.size("rope.dimension_count")


def _kv_heads(metadata: Metadata) -> int:
    """Return `num_key_value_heads`, that of expanded heads; the key has 1, the latent's, in newer files."""
    metadata.own("attention.head_count_kv")
    return heads(metadata)


def _scaling(metadata: Metadata) -> dict[str, Any] | None:
    """Return `rope_scaling`. The key has a tenth of `mscale_all_dim`, to which the models have `mscale` equal."""
    scaling, key = rope_scaling(metadata), "rope.scaling.yarn_log_multiplier"
    if scaling is None or not metadata.own(key):
        return scaling
    scale = round(10 * metadata.number(key), 6)
    return {**scaling, "mscale": scale, "mscale_all_dim": scale}


def _dense_layers(metadata: Metadata) -> int:
    """Return `first_k_dense_replace`."""
    return metadata.size("leading_dense_block_count") if metadata.own("leading_dense_block_count") else 0


_FIELDS: Mapping[str, Field] = {
    **{name: field for name, field in DECODER.items() if name != "head_dim"},
    "num_key_value_heads": _kv_heads,
    "rope_scaling": _scaling,
    "q_lora_rank": _optional_size("attention.q_lora_rank"),
    "kv_lora_rank": size("attention.kv_lora_rank"),
    "qk_rope_head_dim": size("rope.dimension_count"),
    "qk_nope_head_dim": _nope_size,
    "v_head_dim": _head_size("value"),
    "attention_bias": has_any(".attn_output.bias"),
    "mlp_bias": has_any(".ffn_down.bias"),
    "first_k_dense_replace": _dense_layers,
    "n_routed_experts": _optional_size("expert_count"),
    "n_shared_experts": _optional_size("expert_shared_count"),
    "num_experts_per_tok": size("expert_used_count", 1),
    "moe_intermediate_size": size("expert_feed_forward_length", 1),
    "routed_scaling_factor": number("expert_weights_scale", 1.0),
    "norm_topk_prob": lambda metadata: metadata.flag("expert_weights_norm", False),
    "n_group": size("expert_group_count", 1),
    "topk_group": size("expert_group_used_count", 1),
}


def _choice(metadata: Metadata) -> str:
    """Return `topk_method` of V2."""
    gating = metadata.own("expert_gating_func")
    if gating not in (None, 1):
        raise metadata.unsupported("expert_gating_func", "it must be 1 (softmax) or 2 (sigmoid)")
    return "group_limited_greedy" if metadata.size("expert_group_count", 1) > 1 else "greedy"


def _has_sigmoid(metadata: Metadata) -> bool:
    """Return whether experts are chosen by sigmoid; files of GLM-4.7-Flash do not say so, but have a correction."""
    gating = metadata.own("expert_gating_func")
    if gating is None:
        return any(name.endswith(".exp_probs_b.bias") for name in metadata.tensors)
    return bool(gating == _SIGMOID)


_V3 = Architecture("DeepseekV3ForCausalLM", _NAMES, _FIELDS, head_layer=LAYER)

DEEPSEEK2 = Architecture(
    "DeepseekV2ForCausalLM",
    without(_NAMES, "blk.*.exp_probs_b", *HEAD_NAMES),
    {**_FIELDS, "topk_method": _choice},
    variants=((_has_sigmoid, _V3),),
)
