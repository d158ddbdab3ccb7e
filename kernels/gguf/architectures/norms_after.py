"""OLMo 3 and EXAONE 4.0: norms after blocks, and a window in some layers, whose rotary embedding differs."""

from __future__ import annotations

from typing import Any

from quire.kernels.gguf.architectures.description import (
    ATTENTION_BIAS,
    DECODER,
    DECODER_NAMES,
    HEAD_NORM_NAMES,
    ROPE_TENSORS,
    Architecture,
    constant,
    layer_types,
    rope_scaling,
    sliding_window,
    without,
)
from quire.kernels.gguf.metadata import Metadata

POST_NORMS = {
    "blk.*.post_attention_norm": "model.layers.*.post_attention_layernorm",
    "blk.*.post_ffw_norm": "model.layers.*.post_feedforward_layernorm",
}
_NAMES = {**without(DECODER_NAMES, "blk.*.attn_norm", "blk.*.ffn_norm"), **HEAD_NORM_NAMES, **POST_NORMS}


def _ropes(metadata: Metadata) -> dict[str, Any]:
    """Return `rope_parameters` by layer type: layers with a window have no scaling, and maybe another base."""
    theta = metadata.number("rope.freq_base", 10000.0)
    return {
        "full_attention": {"rope_type": "default", **(rope_scaling(metadata) or {}), "rope_theta": theta},
        "sliding_attention": {"rope_type": "default", "rope_theta": metadata.number("rope.freq_base_swa", theta)},
    }


OLMO3 = Architecture(
    "Olmo3ForCausalLM",
    _NAMES,
    {
        **DECODER,
        **ATTENTION_BIAS,
        "rope_scaling": constant(None),
        "rope_parameters": _ropes,
        "sliding_window": sliding_window,
        "layer_types": layer_types(4),
    },
    ROPE_TENSORS,
)
"""The architecture `olmo2` with a window."""


def _exaone_layer_types(metadata: Metadata) -> list[str] | None:
    """Return `layer_types`; without a window all layers are alike."""
    return layer_types(4)(metadata) if sliding_window(metadata) else None


EXAONE4 = Architecture(
    "Exaone4ForCausalLM",
    _NAMES,
    {**DECODER, "sliding_window": sliding_window, "layer_types": _exaone_layer_types},
    ROPE_TENSORS,
)
