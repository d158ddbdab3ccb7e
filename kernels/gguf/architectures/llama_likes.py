"""Decoders that differ little from Llama: Ministral 3, Seed-OSS, ERNIE 4.5, Hunyuan and Apertus."""

from __future__ import annotations

from typing import Any

from quire.kernels.gguf.architectures.description import (
    ATTENTION_BIAS,
    DECODER,
    DECODER_NAMES,
    MLP_BIAS,
    ROPE_TENSORS,
    Architecture,
    has,
    rope_scaling,
    sliding_window,
    without,
)
from quire.kernels.gguf.metadata import Metadata


def _growing_queries(metadata: Metadata) -> dict[str, Any]:
    """Return `rope_parameters` of Ministral 3, with the growth of queries; its files assume an `mscale` of 1."""
    scaling: dict[str, Any] = {"rope_type": "default", **(rope_scaling(metadata) or {})}
    length = scaling.get("original_max_position_embeddings")
    if metadata.own("rope.scaling.yarn_log_multiplier"):
        scaling |= {"mscale": 1.0, "mscale_all_dim": metadata.number("rope.scaling.yarn_log_multiplier")}
    if metadata.own("attention.temperature_scale"):
        scaling["llama_4_scaling_beta"] = metadata.number("attention.temperature_scale")
    if metadata.own("attention.temperature_length") and metadata.size("attention.temperature_length") != length:
        raise metadata.unsupported("attention.temperature_length", f"it must be {length}, the original context length")
    return {**scaling, "rope_theta": metadata.number("rope.freq_base", 10000.0)}


MISTRAL3 = Architecture(
    "Ministral3ForCausalLM",
    DECODER_NAMES,
    {
        **DECODER,
        "rope_scaling": lambda metadata: None,
        "rope_parameters": _growing_queries,
        "sliding_window": sliding_window,
    },
    ROPE_TENSORS,
    permuted=True,
)

SEED_OSS = Architecture(
    "SeedOssForCausalLM",
    {
        **without(DECODER_NAMES, "blk.*.ffn_norm"),
        "blk.*.post_attention_norm": "model.layers.*.post_attention_layernorm",
    },
    {**DECODER, **ATTENTION_BIAS, **MLP_BIAS, "attention_out_bias": has("blk.0.attn_output.bias")},
)

ERNIE4_5 = Architecture("Ernie4_5ForCausalLM", DECODER_NAMES, {**DECODER, "use_bias": has("blk.0.attn_q.bias")})


def _theta(metadata: Metadata) -> float:
    """Return `rope_theta`, which the conversion has scaled; the keys of other scalings then mean nothing."""
    if metadata.own("rope.scaling.type") == "none":
        metadata.own("rope.scaling.factor")
        metadata.own("rope.scaling.original_context_length")
    return metadata.number("rope.freq_base", 10000.0)


HUNYUAN_DENSE = Architecture(
    "HunYuanDenseV1ForCausalLM",
    {
        **DECODER_NAMES,
        "blk.*.attn_q_norm": "model.layers.*.self_attn.query_layernorm",
        "blk.*.attn_k_norm": "model.layers.*.self_attn.key_layernorm",
    },
    {**DECODER, **ATTENTION_BIAS, "rope_theta": _theta},
)


def _scaling_of_apertus(metadata: Metadata) -> dict[str, Any]:
    """Return `rope_scaling`; a model without one is not one with that of Apertus."""
    return rope_scaling(metadata) or {"rope_type": "default"}


APERTUS = Architecture(
    "ApertusForCausalLM",
    {
        **without(DECODER_NAMES, "blk.*.attn_norm", "blk.*.ffn_norm", "blk.*.ffn_gate"),
        "blk.*.attn_norm": "model.layers.*.attention_layernorm",
        "blk.*.ffn_norm": "model.layers.*.feedforward_layernorm",
        "blk.*.attn_q_norm": "model.layers.*.self_attn.q_norm",
        "blk.*.attn_k_norm": "model.layers.*.self_attn.k_norm",
    },
    {**DECODER, **ATTENTION_BIAS, "rope_scaling": _scaling_of_apertus},
    ROPE_TENSORS,
    scalars={
        "xielu.alpha_p": ("model.layers.*.mlp.act_fn.alpha_p", (1,)),
        "xielu.alpha_n": ("model.layers.*.mlp.act_fn.alpha_n", (1,)),
        "xielu.beta": ("model.layers.*.mlp.act_fn.beta", ()),
        "xielu.eps": ("model.layers.*.mlp.act_fn.eps", ()),
    },
)
