"""Qwen2, Qwen2.5, Qwen3, Qwen3-Next and Qwen3.5, dense and with experts.

Windows, which files do not have, are not used by these models. Of layers with a state, the conversion of Qwen3-Next
takes the joint projections apart, but for that of the rates; that of Qwen3.5 puts the value heads of each key head as
many heads apart as there are key heads. What a layer for multi-token prediction has is `mtp` in a model folder.
"""

from __future__ import annotations

from dataclasses import replace

from quire.kernels.gguf.architectures.description import (
    ATTENTION_BIAS,
    DECODER,
    DECODER_NAMES,
    EXPERT_NAMES,
    HEAD_NORM_NAMES,
    PARTIAL_ROTARY,
    ROPE_TENSORS,
    Architecture,
    Field,
    constant,
    has_any,
    ignored,
    layer_count,
    size,
    without,
)
from quire.kernels.gguf.metadata import Metadata


def dense_layers(metadata: Metadata) -> list[int]:
    """Return `mlp_only_layers`, the layers without experts."""
    layers = {int(name.split(".")[1]) for name in metadata.tensors if name.endswith(".ffn_gate.weight")}
    return sorted(layers)


def _expert_size(metadata: Metadata) -> int:
    """Return `moe_intermediate_size`; old files have it only as a part of that of a dense layer."""
    used = metadata.size("expert_used_count")
    return metadata.size("expert_feed_forward_length", max(1, metadata.size("feed_forward_length") // used))


_EXPERTS: dict[str, Field] = {
    "num_experts": size("expert_count"),
    "num_experts_per_tok": size("expert_used_count"),
    "moe_intermediate_size": _expert_size,
    "mlp_only_layers": dense_layers,
}


def _state_layer_types(metadata: Metadata) -> list[str]:
    """Return `layer_types`; older files have the interval of layers with attention alone."""
    count, interval = layer_count(metadata), metadata.size("full_attention_interval", 4)
    has_state = [(layer + 1) % interval != 0 for layer in range(count)]
    if metadata.own("attention.recurrent_layers") is not None:
        has_state = metadata.flags("attention.recurrent_layers", count)
    return ["linear_attention" if state else "full_attention" for state in has_state]


def _value_size(metadata: Metadata) -> int:
    """Return `linear_value_head_dim`."""
    inner, count = metadata.size("ssm.inner_size"), metadata.size("ssm.time_step_rank")
    if inner % count:
        raise metadata.unsupported("ssm.inner_size", f"it must be a multiple of ssm.time_step_rank, {count}")
    return inner // count


_SHARED_EXPERT: dict[str, Field] = {"shared_expert_intermediate_size": size("expert_shared_feed_forward_length")}
_SHARED_NAMES = {
    "blk.*.ffn_gate_inp_shexp": "model.layers.*.mlp.shared_expert_gate",
    "blk.*.ffn_gate_shexp": "model.layers.*.mlp.shared_expert.gate_proj",
    "blk.*.ffn_up_shexp": "model.layers.*.mlp.shared_expert.up_proj",
    "blk.*.ffn_down_shexp": "model.layers.*.mlp.shared_expert.down_proj",
}

QWEN2 = Architecture("Qwen2ForCausalLM", DECODER_NAMES, DECODER, ROPE_TENSORS)
QWEN3 = Architecture(
    "Qwen3ForCausalLM", {**DECODER_NAMES, **HEAD_NORM_NAMES}, {**DECODER, **ATTENTION_BIAS}, ROPE_TENSORS
)
QWEN2MOE = Architecture(
    "Qwen2MoeForCausalLM",
    {**DECODER_NAMES, **EXPERT_NAMES, **_SHARED_NAMES},
    {
        **DECODER,
        **_EXPERTS,
        **_SHARED_EXPERT,
        "norm_topk_prob": constant(False),
        "qkv_bias": ATTENTION_BIAS["attention_bias"],
    },
)
QWEN3MOE = Architecture(
    "Qwen3MoeForCausalLM",
    {**DECODER_NAMES, **HEAD_NORM_NAMES, **EXPERT_NAMES},
    {**DECODER, **_EXPERTS, **ATTENTION_BIAS, "norm_topk_prob": constant(True)},
)

_STATE = "model.layers.*.linear_attn"
_STATE_NAMES = {
    **without(DECODER_NAMES, "blk.*.ffn_norm"),
    **HEAD_NORM_NAMES,
    "blk.*.post_attention_norm": "model.layers.*.post_attention_layernorm",
    "blk.*.attn_qkv": f"{_STATE}.in_proj_qkv",
    "blk.*.attn_gate": f"{_STATE}.in_proj_z",
    "blk.*.ssm_conv1d": f"{_STATE}.conv1d",
    "blk.*.ssm_a": f"{_STATE}.A_log",
    "blk.*.ssm_dt": f"{_STATE}.dt_bias",
    "blk.*.ssm_norm": f"{_STATE}.norm",
    "blk.*.ssm_out": f"{_STATE}.out_proj",
    "blk.*.nextn.eh_proj": "mtp.fc",
    "blk.*.nextn.enorm": "mtp.pre_fc_norm_embedding",
    "blk.*.nextn.hnorm": "mtp.pre_fc_norm_hidden",
    "blk.*.nextn.shared_head_norm": "mtp.norm",
}
_HEAD_LAYER = "mtp.layers.0"
_STATE_FIELDS: dict[str, Field] = {
    **DECODER,
    **PARTIAL_ROTARY,
    "attention_bias": has_any(".attn_q.bias"),
    "layer_types": _state_layer_types,
    "linear_num_key_heads": size("ssm.group_count"),
    "linear_num_value_heads": size("ssm.time_step_rank"),
    "linear_key_head_dim": size("ssm.state_size"),
    "linear_value_head_dim": _value_size,
    "linear_conv_kernel_dim": size("ssm.conv_kernel"),
}
_JOINT = Architecture(
    "Qwen3NextForCausalLM",
    {
        **without(_STATE_NAMES, "blk.*.attn_qkv", "blk.*.attn_gate"),
        **EXPERT_NAMES,
        **_SHARED_NAMES,
        "blk.*.ssm_in": f"{_STATE}.in_proj_qkvz",
        "blk.*.ssm_ba": f"{_STATE}.in_proj_ba",
    },
    {**_STATE_FIELDS, **_EXPERTS, **_SHARED_EXPERT, "norm_topk_prob": constant(True)},
    ROPE_TENSORS,
    norm_offset=1.0,
    head_layer=_HEAD_LAYER,
)
QWEN3NEXT = replace(
    _JOINT,
    names={**_STATE_NAMES, **EXPERT_NAMES, **_SHARED_NAMES, "blk.*.ssm_ba": f"{_STATE}.in_proj_ba"},
    fields={**_JOINT.fields, "joint_projections": constant(False)},
    variants=((lambda metadata: any(name.endswith(".ssm_in.weight") for name in metadata.tensors), _JOINT),),
)
QWEN35 = Architecture(
    "Qwen3_5ForCausalLM",
    {**_STATE_NAMES, "blk.*.ssm_beta": f"{_STATE}.in_proj_b", "blk.*.ssm_alpha": f"{_STATE}.in_proj_a"},
    {
        **_STATE_FIELDS,
        "interleaved_value_heads": constant(True),
        "positions_of_images": ignored("rope.dimension_sections"),
    },
    ROPE_TENSORS,
    norm_offset=1.0,
    head_layer=_HEAD_LAYER,
)
QWEN35MOE = replace(
    QWEN35,
    model_class="Qwen3_5MoeForCausalLM",
    names={**QWEN35.names, **EXPERT_NAMES, **_SHARED_NAMES},
    fields={**QWEN35.fields, **_EXPERTS, **_SHARED_EXPERT},
)

OLMOE = Architecture(
    "OlmoeForCausalLM",
    {
        **without(DECODER_NAMES, "blk.*.ffn_gate", "blk.*.ffn_up", "blk.*.ffn_down"),
        **HEAD_NORM_NAMES,
        **EXPERT_NAMES,
    },
    {
        **DECODER,
        "num_experts": size("expert_count"),
        "num_experts_per_tok": size("expert_used_count"),
        "norm_topk_prob": constant(False),
        **ATTENTION_BIAS,
    },
)
