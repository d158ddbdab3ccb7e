"""Decoders with an architecture of their own: Phi-3, OLMo 2, GLM-4, Command R7B, StarCoder 2, GPT-2 and gpt-oss."""

from __future__ import annotations

from typing import Any

from quire.kernels.gguf.architectures.description import (
    ATTENTION_BIAS,
    DECODER,
    DECODER_NAMES,
    EXPERT_NAMES,
    HEAD_NORM_NAMES,
    PARTIAL_ROTARY,
    ROPE_TENSORS,
    Architecture,
    check_off,
    constant,
    has,
    heads,
    is_tied,
    layer_types,
    number,
    rope_scaling,
    size,
    sliding_window,
    vocab_size,
    without,
)
from quire.kernels.gguf.architectures.norms_after import OLMO3, POST_NORMS
from quire.kernels.gguf.metadata import Metadata

_FUSED = {"blk.*.ffn_up": "model.layers.*.mlp.gate_up_proj"}
_LAYER_NORM = "attention.layer_norm_epsilon"


PHI3 = Architecture(
    "Phi3ForCausalLM",
    {**without(DECODER_NAMES, "blk.*.ffn_gate", "blk.*.attn_q", "blk.*.attn_k", "blk.*.attn_v"), **_FUSED},
    {
        **DECODER,
        **PARTIAL_ROTARY,
        "original_max_position_embeddings": lambda metadata: metadata.size(
            "rope.scaling.original_context_length", metadata.size("context_length")
        ),
        "sliding_window": sliding_window,
    },
    ROPE_TENSORS,
)

OLMO2 = Architecture(
    "Olmo2ForCausalLM",
    {**without(DECODER_NAMES, "blk.*.attn_norm", "blk.*.ffn_norm"), **HEAD_NORM_NAMES, **POST_NORMS},
    {
        **DECODER,
        **ATTENTION_BIAS,
        "sliding_window": check_off("attention.sliding_window", "it must be 0"),
    },
    variants=((lambda metadata: bool(metadata.own("attention.sliding_window")), OLMO3),),
)

GLM4 = Architecture(
    "Glm4ForCausalLM",
    {
        **without(DECODER_NAMES, "blk.*.ffn_gate"),
        **_FUSED,
        "blk.*.post_attention_norm": "model.layers.*.post_self_attn_layernorm",
        "blk.*.post_ffw_norm": "model.layers.*.post_mlp_layernorm",
    },
    {**DECODER, **PARTIAL_ROTARY, **ATTENTION_BIAS},
    ROPE_TENSORS,
)

COHERE2 = Architecture(
    "Cohere2ForCausalLM",
    without(DECODER_NAMES, "blk.*.ffn_norm", "output"),
    {
        **{name: field for name, field in DECODER.items() if name != "rms_norm_eps"},
        **ATTENTION_BIAS,
        "layer_norm_eps": number(_LAYER_NORM),
        "sliding_window": size("attention.sliding_window"),
        "layer_types": layer_types(4),
        "logit_scale": number("logit_scale"),
    },
)

STARCODER2 = Architecture(
    "Starcoder2ForCausalLM",
    {
        **without(DECODER_NAMES, "blk.*.ffn_gate"),
        "blk.*.ffn_up": "model.layers.*.mlp.c_fc",
        "blk.*.ffn_down": "model.layers.*.mlp.c_proj",
    },
    {
        **{name: field for name, field in DECODER.items() if name != "rms_norm_eps"},
        "norm_epsilon": number(_LAYER_NORM),
        "use_bias": has("blk.0.attn_q.bias"),
        "sliding_window": sliding_window,
    },
    ROPE_TENSORS,
)


def _inner_size(metadata: Metadata) -> int:
    """Return `n_inner`, the rows of a tensor: the conversion writes 4 * n_embd in its place."""
    metadata.own("feed_forward_length")
    found = metadata.tensors.get("blk.0.ffn_up.weight")
    return metadata.size("feed_forward_length") if found is None else found.shape[0]


GPT2 = Architecture(
    "GPT2LMHeadModel",
    {
        "token_embd": "transformer.wte", "position_embd": "transformer.wpe", "output_norm": "transformer.ln_f",
        "output": "lm_head", "blk.*.attn_norm": "transformer.h.*.ln_1", "blk.*.ffn_norm": "transformer.h.*.ln_2",
        "blk.*.attn_qkv": "transformer.h.*.attn.c_attn", "blk.*.attn_output": "transformer.h.*.attn.c_proj",
        "blk.*.ffn_up": "transformer.h.*.mlp.c_fc", "blk.*.ffn_down": "transformer.h.*.mlp.c_proj",
    },
    {
        "vocab_size": vocab_size,
        "n_embd": size("embedding_length"),
        "n_layer": size("block_count"),
        "n_head": heads,
        "n_positions": size("context_length"),
        "n_inner": _inner_size,
        "layer_norm_epsilon": number(_LAYER_NORM),
        "tie_word_embeddings": is_tied,
        "transposed_weights": constant(False),
    },
)  # fmt: skip


def _untruncated_scaling(metadata: Metadata) -> dict[str, Any] | None:
    """Return `rope_scaling` with the field that files do not have, and the model has."""
    scaling = rope_scaling(metadata)
    return scaling if scaling is None or scaling["rope_type"] != "yarn" else {**scaling, "truncate": False}


def _expert_size(metadata: Metadata) -> int:
    """Return `intermediate_size`, that of an expert."""
    metadata.own("feed_forward_length")
    return metadata.size("expert_feed_forward_length")


GPT_OSS = Architecture(
    "GptOssForCausalLM",
    {
        **without(DECODER_NAMES, "blk.*.ffn_norm", "blk.*.ffn_gate", "blk.*.ffn_up", "blk.*.ffn_down"),
        **EXPERT_NAMES,
        "blk.*.post_attention_norm": "model.layers.*.post_attention_layernorm",
        "blk.*.attn_sinks": "model.layers.*.self_attn.sinks",
    },
    {
        **DECODER,
        **ATTENTION_BIAS,
        "rope_scaling": _untruncated_scaling,
        "intermediate_size": _expert_size,
        "num_local_experts": size("expert_count"),
        "num_experts_per_tok": size("expert_used_count"),
        "sliding_window": size("attention.sliding_window"),
        "layer_types": layer_types(2),
    },
)  # fmt: skip
