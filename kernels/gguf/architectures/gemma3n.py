"""Gemma 3n. The conversion leaves norms as they are, and stacks the layers that make and join streams."""

from __future__ import annotations

import math
from statistics import NormalDist

from quire.kernels.gguf.architectures.description import (
    ATTENTION_BIAS,
    DECODER,
    HEAD_NORM_NAMES,
    Architecture,
    constant,
    head_size,
    layer_count,
    layer_types,
    number,
    size,
    sliding_window,
    without,
)
from quire.kernels.gguf.architectures.gemma import NAMES
from quire.kernels.gguf.architectures.gemma4 import PER_LAYER_NAMES, input_rows, shared_layers, sizes_by_layer
from quire.kernels.gguf.metadata import Metadata

_DIGITS, _OWN_KV_LAYERS = 6, 20


def _sparsity(metadata: Metadata) -> list[float] | None:
    """Return `activation_sparsity_pattern`. The file has the numbers of standard deviations, -inf for all gates."""
    key, layers = "activation_sparsity_scale", layer_count(metadata)
    given = metadata.own(key)
    if given is None:
        return None
    if not isinstance(given, list) or len(given) != layers or not all(type(each) is float for each in given):
        raise metadata.unsupported(key, f"it must be a number for each of {layers} layers")
    if any(math.isnan(each) or each == math.inf for each in given):
        raise metadata.unsupported(key, "it must be numbers of standard deviations, or -inf")
    return [round(NormalDist().cdf(each), _DIGITS) for each in given]


def _shared_layers(metadata: Metadata) -> int:
    """Return `num_kv_shared_layers`. Without the key, the layers after the first 20 share, as in llama.cpp."""
    if metadata.own("attention.shared_kv_layers") is None:
        return max(0, layer_count(metadata) - _OWN_KV_LAYERS)
    return shared_layers(metadata)


def _active_stream(metadata: Metadata) -> int:
    active: int = metadata.own("altup.active_idx") or 0
    return active


def _laurel_rank(metadata: Metadata) -> int | None:
    tensor = metadata.tensors.get("blk.0.laurel_l.weight")
    return None if tensor is None else tensor.shape[0]


GEMMA3N = Architecture(
    "Gemma3nForCausalLM",
    {
        **without(NAMES, "blk.*.attn_qkv"),
        **HEAD_NORM_NAMES,
        **PER_LAYER_NAMES,
        "altup_proj": "model.altup_projections.*",
        "altup_unembd_proj": "model.altup_unembed_projections.*",
        "blk.*.altup_router": "model.layers.*.altup.modality_router",
        "blk.*.altup_router_norm": "model.layers.*.altup.router_norm",
        "blk.*.altup_predict_coef": "model.layers.*.altup.prediction_coefs",
        "blk.*.altup_correct_coef": "model.layers.*.altup.correction_coefs",
        "blk.*.altup_correct_scale": "model.layers.*.altup.correct_output_scale",
        "blk.*.laurel_l": "model.layers.*.laurel.linear_left",
        "blk.*.laurel_r": "model.layers.*.laurel.linear_right",
        "blk.*.laurel_post_norm": "model.layers.*.laurel.post_laurel_norm",
    },
    {
        **DECODER,
        **ATTENTION_BIAS,
        "head_dim": head_size,
        "intermediate_size": sizes_by_layer("feed_forward_length"),
        "rope_theta": number("rope.freq_base", 1e6),
        "rope_local_base_freq": number("rope.freq_base_swa", 1e4),
        "sliding_window": sliding_window,
        "layer_types": layer_types(5),
        "final_logit_softcapping": number("final_logit_softcapping", 30.0),
        "num_kv_shared_layers": _shared_layers,
        "hidden_size_per_layer_input": size("embedding_length_per_layer_input"),
        "vocab_size_per_layer_input": input_rows,
        "altup_num_inputs": size("altup.num_inputs", 4),
        "altup_active_idx": _active_stream,
        "altup_correct_scale": constant(True),
        "laurel_rank": _laurel_rank,
        "activation_sparsity_pattern": _sparsity,
    },
)
