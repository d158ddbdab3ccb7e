"""Models some of whose layers keep a state: LFM2, Granite 4, Falcon-H1 and Nemotron-H; those of Qwen are in qwen.py.

The conversion folds the multipliers of Falcon-H1 into its weights. A layer without KV heads has no attention. Files do
not have the limits of time steps, nor the scale of the weights of LFM2's experts, but for the defaults of the models.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from quire.kernels.gguf.architectures.description import (
    COMMON,
    DECODER,
    DECODER_NAMES,
    EXPERT_NAMES,
    Architecture,
    Field,
    Names,
    attention_layers,
    constant,
    has_any,
    head_size,
    ignored,
    is_tied,
    kv_heads,
    layer_count,
    number,
    optional_size,
    size,
    without,
)
from quire.kernels.gguf.metadata import Metadata

_SIGMOID = 2  # of expert_gating_func


def _kinds(state: str, attention: str) -> Field:
    """Return the field with the kind of each layer."""
    return lambda metadata: [attention if attends else state for attends in attention_layers(metadata)]


def _mamba_names(module: str) -> dict[str, str]:
    """Return the names of Mamba 2 layers."""
    parts = {
        "ssm_in": "in_proj", "ssm_conv1d": "conv1d", "ssm_dt": "dt_bias", "ssm_a": "A_log", "ssm_d": "D",
        "ssm_norm": "norm", "ssm_out": "out_proj",
    }  # fmt: skip
    return {f"blk.*.{name}": f"{module}.{part}" for name, part in parts.items()}


def _mamba_head_size(metadata: Metadata) -> int:
    """Return the elements of a value of a head."""
    inner, count = metadata.size("ssm.inner_size"), metadata.size("ssm.time_step_rank")
    if inner % count:
        raise metadata.unsupported("ssm.inner_size", f"it must be a multiple of ssm.time_step_rank, {count}")
    return inner // count


_MAMBA: Mapping[str, Field] = {
    "mamba_n_heads": size("ssm.time_step_rank"),
    "mamba_d_head": _mamba_head_size,
    "mamba_n_groups": size("ssm.group_count"),
    "mamba_d_state": size("ssm.state_size"),
    "mamba_d_conv": size("ssm.conv_kernel"),
    "mamba_conv_bias": has_any(".ssm_conv1d.bias"),
    "mamba_proj_bias": has_any(".ssm_in.bias"),
}

_LFM2_LAYER = "model.layers.*"
_LFM2_NAMES: Names = {
    **without(DECODER_NAMES, "output_norm", "blk.*.attn_qkv"),
    "token_embd_norm": "model.embedding_norm",
    "blk.*.attn_norm": f"{_LFM2_LAYER}.operator_norm",
    "blk.*.attn_output": f"{_LFM2_LAYER}.self_attn.out_proj",
    "blk.*.attn_q_norm": f"{_LFM2_LAYER}.self_attn.q_layernorm",
    "blk.*.attn_k_norm": f"{_LFM2_LAYER}.self_attn.k_layernorm",
    "blk.*.shortconv.conv": f"{_LFM2_LAYER}.conv.conv",
    "blk.*.shortconv.in_proj": f"{_LFM2_LAYER}.conv.in_proj",
    "blk.*.shortconv.out_proj": f"{_LFM2_LAYER}.conv.out_proj",
    "blk.*.ffn_norm": f"{_LFM2_LAYER}.ffn_norm",
    "blk.*.ffn_gate": f"{_LFM2_LAYER}.feed_forward.w1",
    "blk.*.ffn_up": f"{_LFM2_LAYER}.feed_forward.w3",
    "blk.*.ffn_down": f"{_LFM2_LAYER}.feed_forward.w2",
}
_LFM2_FIELDS: Mapping[str, Field] = {
    **{name: field for name, field in DECODER.items() if name != "rms_norm_eps"},
    "norm_eps": number("attention.layer_norm_rms_epsilon"),
    "block_auto_adjust_ff_dim": constant(False),
    "conv_L_cache": size("shortconv.l_cache"),
    "conv_bias": has_any(".shortconv.conv.bias"),
    "layer_types": _kinds("conv", "full_attention"),
}

LFM2 = Architecture("Lfm2ForCausalLM", _LFM2_NAMES, _LFM2_FIELDS)


def _sigmoid(metadata: Metadata) -> None:
    """Raise ModelError for other scores of experts."""
    if metadata.own("expert_gating_func") != _SIGMOID:
        raise metadata.unsupported("expert_gating_func", f"it must be {_SIGMOID} (sigmoid)")


def _dense_layers(metadata: Metadata) -> int:
    """Return `num_dense_layers`."""
    return metadata.counts("leading_dense_block_count", 1)[0] if metadata.own("leading_dense_block_count") else 0


LFM2MOE = Architecture(
    "Lfm2MoeForCausalLM",
    {**_LFM2_NAMES, **EXPERT_NAMES, "blk.*.exp_probs_b": f"{_LFM2_LAYER}.feed_forward.expert_bias"},
    {
        **_LFM2_FIELDS,
        "num_dense_layers": _dense_layers,
        "num_experts": size("expert_count"),
        "num_experts_per_tok": size("expert_used_count"),
        "moe_intermediate_size": size("expert_feed_forward_length"),
        "routed_scaling_factor": number("expert_weights_scale", 1.0),
        "norm_topk_prob": constant(True),
        "use_expert_bias": has_any(".exp_probs_b.bias"),
        "scores": _sigmoid,
    },
)

_SHARED_MLP = "model.layers.*.shared_mlp"


def _positions(metadata: Metadata) -> str:
    """Return `position_embedding_type`."""
    return "rope" if metadata.flag("rope.scaling.finetuned", True) else "nope"


def _shared_size(metadata: Metadata) -> int:
    """Return `shared_intermediate_size`; that of a model without experts may be under either key."""
    inner = metadata.size("feed_forward_length")
    return metadata.size("expert_shared_feed_forward_length", inner)


_GRANITE_DENSE = Architecture(
    "GraniteMoeHybridForCausalLM",
    {
        **without(DECODER_NAMES, "blk.*.ffn_gate", "blk.*.ffn_up", "blk.*.ffn_down"),
        **_mamba_names("model.layers.*.mamba"),
        "blk.*.ffn_gate": f"{_SHARED_MLP}.gate_linear",
        "blk.*.ffn_up": f"{_SHARED_MLP}.up_linear",
        "blk.*.ffn_down": f"{_SHARED_MLP}.output_linear",
    },
    {
        **DECODER,
        **_MAMBA,
        "attention_bias": has_any(".attn_q.bias"),
        "attention_multiplier": number("attention.scale"),
        "embedding_multiplier": number("embedding_scale", 1.0),
        "residual_multiplier": number("residual_scale", 1.0),
        "logits_scaling": number("logit_scale", 1.0),
        "layer_types": _kinds("mamba", "attention"),
        "position_embedding_type": _positions,
        "fused_shared_mlp": constant(False),
        "shared_intermediate_size": _shared_size,
        "num_local_experts": constant(0),
        "unused": ignored("expert_used_count"),
    },
    permuted=True,
)
GRANITE_HYBRID = replace(
    _GRANITE_DENSE,
    names={
        **without(_GRANITE_DENSE.names, "blk.*.ffn_gate", "blk.*.ffn_up", "blk.*.ffn_down"),
        **EXPERT_NAMES,
        "blk.*.ffn_gate_shexp": f"{_SHARED_MLP}.gate_linear",
        "blk.*.ffn_up_shexp": f"{_SHARED_MLP}.up_linear",
        "blk.*.ffn_down_shexp": f"{_SHARED_MLP}.output_linear",
    },
    fields={
        **_GRANITE_DENSE.fields,
        "shared_intermediate_size": size("expert_shared_feed_forward_length"),
        "num_local_experts": size("expert_count"),
        "num_experts_per_tok": size("expert_used_count"),
    },
    variants=((lambda metadata: not metadata.own("expert_count"), _GRANITE_DENSE),),
)

_FALCON_LAYER = "model.layers.*"
FALCON_H1 = Architecture(
    "FalconH1ForCausalLM",
    {
        **DECODER_NAMES,
        **_mamba_names(f"{_FALCON_LAYER}.mamba"),
        "output_norm": "model.final_layernorm",
        "blk.*.ffn_norm": f"{_FALCON_LAYER}.pre_ff_layernorm",
        "blk.*.ffn_gate": f"{_FALCON_LAYER}.feed_forward.gate_proj",
        "blk.*.ffn_up": f"{_FALCON_LAYER}.feed_forward.up_proj",
        "blk.*.ffn_down": f"{_FALCON_LAYER}.feed_forward.down_proj",
    },
    {
        **DECODER,
        **_MAMBA,
        "attention_bias": has_any(".attn_q.bias"),
        "mlp_bias": has_any(".ffn_up.bias"),
        "projectors_bias": has_any(".ssm_out.bias"),
        "mamba_d_ssm": size("ssm.inner_size"),
        "mamba_rms_norm": has_any(".ssm_norm.weight"),
        "mamba_norm_before_gate": constant(False),
    },
)

_NEMOTRON_LAYER = "backbone.layers.*"
_NEMOTRON_MIXER = f"{_NEMOTRON_LAYER}.mixer"


def _nemotron_kinds(metadata: Metadata) -> list[str]:
    """Return `layers_block_type`: a layer without attention is feed-forward if it has a width, or keeps a state."""
    count = layer_count(metadata)
    widths = metadata.counts("feed_forward_length", count)
    feed_forward = "moe" if metadata.own("expert_count") else "mlp"
    return [
        "attention" if attends else feed_forward if width else "mamba"
        for attends, width in zip(attention_layers(metadata), widths, strict=True)
    ]


def _width(metadata: Metadata) -> int:
    """Return `intermediate_size`, of all MLPs."""
    widths = set(metadata.counts("feed_forward_length", layer_count(metadata))) - {0}
    if len(widths) > 1:
        raise metadata.unsupported("feed_forward_length", "it must be the same for all layers that have an MLP")
    return widths.pop() if widths else 1


NEMOTRON_H = Architecture(
    "NemotronHForCausalLM",
    {
        "token_embd": "backbone.embeddings", "output_norm": "backbone.norm_f", "output": "lm_head",
        "blk.*.attn_norm": f"{_NEMOTRON_LAYER}.norm",
        **{f"blk.*.attn_{part}": f"{_NEMOTRON_MIXER}.{part}_proj" for part in "qkv"},
        "blk.*.attn_output": f"{_NEMOTRON_MIXER}.o_proj",
        **_mamba_names(_NEMOTRON_MIXER),
        "blk.*.ffn_up": f"{_NEMOTRON_MIXER}.up_proj",
        "blk.*.ffn_down": f"{_NEMOTRON_MIXER}.down_proj",
    },
    {
        **COMMON,
        "num_key_value_heads": kv_heads,
        "head_dim": head_size,
        "layer_norm_epsilon": number("attention.layer_norm_epsilon"),
        "tie_word_embeddings": is_tied,
        "layers_block_type": _nemotron_kinds,
        "intermediate_size": _width,
        "mlp_bias": has_any(".ffn_up.bias"),
        "use_bias": has_any(".ssm_in.bias"),
        "mamba_num_heads": size("ssm.time_step_rank"),
        "mamba_head_dim": _mamba_head_size,
        "n_groups": size("ssm.group_count"),
        "ssm_state_size": size("ssm.state_size"),
        "conv_kernel": size("ssm.conv_kernel"),
        "use_conv_bias": has_any(".ssm_conv1d.bias"),
        "unused": ignored("attention.layer_norm_rms_epsilon", "rope.dimension_count", "rope.freq_base"),
    },
    permuted=True,
)  # fmt: skip

NEMOTRON_H_MOE = replace(
    NEMOTRON_H,
    names={
        **without(NEMOTRON_H.names, "blk.*.ffn_up", "blk.*.ffn_down"),
        "blk.*.ffn_gate_inp": f"{_NEMOTRON_MIXER}.gate",
        "blk.*.exp_probs_b": f"{_NEMOTRON_MIXER}.gate.e_score_correction_bias",
        "blk.*.ffn_up_exps": f"{_NEMOTRON_MIXER}.experts.*.up_proj",
        "blk.*.ffn_down_exps": f"{_NEMOTRON_MIXER}.experts.*.down_proj",
        "blk.*.ffn_latent_down": f"{_NEMOTRON_MIXER}.fc1_latent_proj",
        "blk.*.ffn_latent_up": f"{_NEMOTRON_MIXER}.fc2_latent_proj",
        "blk.*.ffn_up_shexp": f"{_NEMOTRON_MIXER}.shared_experts.up_proj",
        "blk.*.ffn_down_shexp": f"{_NEMOTRON_MIXER}.shared_experts.down_proj",
    },
    fields={
        **NEMOTRON_H.fields,
        "n_routed_experts": size("expert_count"),
        "num_experts_per_tok": size("expert_used_count"),
        "moe_intermediate_size": size("expert_feed_forward_length"),
        "moe_latent_size": optional_size("moe_latent_size"),
        "moe_shared_expert_intermediate_size": size("expert_shared_feed_forward_length"),
        "routed_scaling_factor": number("expert_weights_scale", 1.0),
        "norm_topk_prob": lambda metadata: metadata.flag("expert_weights_norm", False),
        "n_group": size("expert_group_count", 1),
        "topk_group": size("expert_group_used_count", 1),
        "n_shared_experts": size("expert_shared_count", 1),
    },
)
