"""Gemma 4. The conversion leaves norms as they are; it has factors of frequencies for pairs that are not rotated."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from quire.kernels.gguf.architectures.description import (
    ATTENTION_BIAS,
    COMMON,
    HEAD_NORM_NAMES,
    MOST_LAYERS,
    Architecture,
    Field,
    Names,
    has,
    is_tied,
    layer_types,
    number,
    optional_number,
    optional_size,
    size,
    without,
)
from quire.kernels.gguf.architectures.gemma import NAMES
from quire.kernels.gguf.metadata import Metadata

_NO_ROTATION = 1e29
"""Least factor by which a frequency is divided so that nothing is rotated."""


_kinds = layer_types(6)


def sizes_by_layer(key: str) -> Callable[[Metadata], list[int]]:
    """Return the field that is a size of each layer; files that have one for all layers have no list."""

    def sizes(metadata: Metadata) -> list[int]:
        layers, given = metadata.size("block_count"), metadata.own(key)
        if not isinstance(given, list):
            return [metadata.size(key)] * min(layers, MOST_LAYERS)
        if len(given) != layers or not all(type(entry) is int and entry > 0 for entry in given):
            raise metadata.unsupported(key, f"it must be an integer above 0, or one for each of {layers} layers")
        return given

    return sizes


_kv_heads, _inner_sizes = sizes_by_layer("attention.head_count_kv"), sizes_by_layer("feed_forward_length")


def _size_of_head(suffix: str) -> Field:
    """Return the field that is the size of a head of the layers with (`_swa`) or without a window."""

    def head(metadata: Metadata) -> int:
        dim = metadata.size(f"attention.key_length{suffix}")
        for key in (f"attention.value_length{suffix}", f"rope.dimension_count{suffix}"):
            if metadata.size(key, dim) != dim:
                raise metadata.unsupported(key, f"it must be {dim}, as attention.key_length{suffix}")
        return dim

    return head


def _heads_by_layer(metadata: Metadata) -> dict[str, Any]:
    """Return `per_layer_config`: the heads of each layer without a window."""
    kinds, kv, dim = _kinds(metadata), _kv_heads(metadata), _size_of_head("")
    return {
        str(layer): {"head_dim": dim(metadata), "num_key_value_heads": kv[layer]}
        for layer, kind in enumerate(kinds)
        if kind == "full_attention"
    }


def _window_kv_heads(metadata: Metadata) -> int:
    """Return `num_key_value_heads`, that of the layers with a window."""
    kinds, kv = _kinds(metadata), _kv_heads(metadata)
    return kv[kinds.index("sliding_attention")] if "sliding_attention" in kinds else kv[0]


def _keys_as_values(metadata: Metadata) -> bool:
    """Return `attention_k_eq_v`: the first layer without a window has keys, and no values."""
    kinds = _kinds(metadata)
    layer = kinds.index("full_attention") if "full_attention" in kinds else 0
    return metadata.has(f"blk.{layer}.attn_k.weight") and not metadata.has(f"blk.{layer}.attn_v.weight")


def shared_layers(metadata: Metadata) -> int:
    """Return `num_kv_shared_layers`; the first files of Gemma 3n have a float."""
    key = "attention.shared_kv_layers"
    value = metadata.own(key)
    if type(value) is float and value.is_integer():
        value = int(value)
    if value is not None and (type(value) is not int or not 0 <= value <= metadata.size("block_count")):
        raise metadata.unsupported(key, "it must be an integer from 0 to the number of layers")
    return value or 0


def _inner(metadata: Metadata) -> int:
    return _inner_sizes(metadata)[0]


def _is_double_wide(metadata: Metadata) -> bool:
    """Return `use_double_wide_mlp`: that of layers which read the KV of others is twice as wide."""
    given, first = _inner_sizes(metadata), metadata.size("block_count") - shared_layers(metadata)
    if given == [given[0]] * len(given):
        return False
    if given != [given[0] * (1 + (layer >= first)) for layer in range(len(given))]:
        raise metadata.unsupported(
            "feed_forward_length", "only the last attention.shared_kv_layers may have twice that"
        )
    return True


def _ropes(metadata: Metadata) -> dict[str, Any]:
    """Return `rope_parameters`. The file has a factor of 1 for each pair that layers without a window rotate."""
    name, half = "rope_freqs.weight", _size_of_head("")(metadata) // 2
    factors = metadata.factors(name) if metadata.has(name) else [1.0] * half
    rotated = factors.count(1.0)
    if len(factors) != half or min(factors[rotated:], default=math.inf) < _NO_ROTATION:
        raise metadata.unsupported(
            "attention.key_length", f"{name} must have {half} factors: 1, and for pairs not rotated {_NO_ROTATION:g}"
        )
    part = rotated / half
    part = part if int(2 * half * part / 2) == rotated else math.nextafter(part, 1)
    theta, window_theta = number("rope.freq_base", 1e6)(metadata), number("rope.freq_base_swa", 1e4)(metadata)
    return {
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": part, "rope_theta": theta},
        "sliding_attention": {"rope_type": "default", "rope_theta": window_theta},
    }


def input_rows(metadata: Metadata) -> int | None:
    """Return `vocab_size_per_layer_input`."""
    tensor = metadata.tensors.get("per_layer_token_embd.weight")
    return None if tensor is None else tensor.shape[0]


def _input_width(metadata: Metadata) -> int:
    """Return `hidden_size_per_layer_input`, 0 for none."""
    key = "embedding_length_per_layer_input"
    return metadata.size(key) if metadata.own(key) else 0


PER_LAYER_NAMES: Names = {
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
    "blk.*.inp_gate": "model.layers.*.per_layer_input_gate",
    "blk.*.proj": "model.layers.*.per_layer_projection",
    "blk.*.post_norm": "model.layers.*.post_per_layer_input_norm",
}
"""Names of what has to do with per-layer inputs."""

GEMMA4 = Architecture(
    "Gemma4ForCausalLM",
    {
        **without(NAMES, "blk.*.attn_qkv"),
        **HEAD_NORM_NAMES,
        "blk.*.layer_output_scale": "model.layers.*.layer_scalar",
        **PER_LAYER_NAMES,
        "blk.*.pre_ffw_norm_2": "model.layers.*.pre_feedforward_layernorm_2",
        "blk.*.post_ffw_norm_1": "model.layers.*.post_feedforward_layernorm_1",
        "blk.*.post_ffw_norm_2": "model.layers.*.post_feedforward_layernorm_2",
        "blk.*.ffn_gate_inp": "model.layers.*.router.proj",
        "blk.*.ffn_gate_inp.scale": "model.layers.*.router.scale",
        "blk.*.ffn_gate_exps": "model.layers.*.experts.*.gate_proj",
        "blk.*.ffn_up_exps": "model.layers.*.experts.*.up_proj",
        "blk.*.ffn_gate_up_exps": "model.layers.*.experts.*.gate_up_proj",
        "blk.*.ffn_down_exps": "model.layers.*.experts.*.down_proj",
        "blk.*.ffn_down_exps.scale": "model.layers.*.router.per_expert_scale",
    },
    {
        **COMMON,
        **ATTENTION_BIAS,
        "intermediate_size": _inner,
        "use_double_wide_mlp": _is_double_wide,
        "num_key_value_heads": _window_kv_heads,
        "head_dim": _size_of_head("_swa"),
        "per_layer_config": _heads_by_layer,
        "attention_k_eq_v": _keys_as_values,
        "num_kv_shared_layers": shared_layers,
        "rms_norm_eps": number("attention.layer_norm_rms_epsilon"),
        "rope_parameters": _ropes,
        "tie_word_embeddings": is_tied,
        "sliding_window": size("attention.sliding_window"),
        "layer_types": _kinds,
        "final_logit_softcapping": optional_number("final_logit_softcapping"),
        "hidden_size_per_layer_input": _input_width,
        "vocab_size_per_layer_input": input_rows,
        "enable_moe_block": has("blk.0.ffn_gate_inp.weight"),
        "num_experts": optional_size("expert_count"),
        "top_k_experts": optional_size("expert_used_count"),
        "moe_intermediate_size": optional_size("expert_feed_forward_length"),
    },
    used=("rope_freqs.weight",),
)
