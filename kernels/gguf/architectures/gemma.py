"""Gemma 2 and 3, and EmbeddingGemma. The conversion adds to the weights of norms the 1 that the models add.

Files do not have the scale of attention scores. It comes from the size of a head, but for the largest models, which
llama.cpp knows by their number of layers.
"""

from __future__ import annotations

from dataclasses import replace

from quire.kernels.gguf.architectures.description import (
    ATTENTION_BIAS,
    DECODER,
    DECODER_NAMES,
    HEAD_NORM_NAMES,
    Architecture,
    Field,
    constant,
    head_size,
    heads,
    layer_types,
    number,
    optional_number,
    sliding_window,
)
from quire.kernels.gguf.metadata import Metadata

NAMES = {
    **DECODER_NAMES,
    "blk.*.post_attention_norm": "model.layers.*.post_attention_layernorm",
    "blk.*.ffn_norm": "model.layers.*.pre_feedforward_layernorm",
    "blk.*.post_ffw_norm": "model.layers.*.post_feedforward_layernorm",
}
"""Names of all Gemmas."""


def _attention_scalar(layers: int) -> Field:
    """Return the field `query_pre_attn_scalar`; the model of so many `layers` has the inputs of a head."""

    def scalar(metadata: Metadata) -> int:
        if metadata.size("block_count") == layers:
            return metadata.size("embedding_length") // heads(metadata)
        return head_size(metadata)

    return scalar


GEMMA2 = Architecture(
    "Gemma2ForCausalLM",
    NAMES,
    {
        **DECODER,
        **ATTENTION_BIAS,
        "sliding_window": sliding_window,
        "layer_types": layer_types(2),
        "attn_logit_softcapping": optional_number("attn_logit_softcapping"),
        "final_logit_softcapping": optional_number("final_logit_softcapping"),
        "query_pre_attn_scalar": _attention_scalar(46),
    },
    norm_offset=1.0,
)

GEMMA3 = Architecture(
    "Gemma3ForCausalLM",
    {**NAMES, **HEAD_NORM_NAMES},
    {
        **DECODER,
        **ATTENTION_BIAS,
        "rope_theta": number("rope.freq_base", 1e6),
        "rope_local_base_freq": number("rope.freq_base_swa", 10000.0),
        "sliding_window": sliding_window,
        "layer_types": layer_types(6),
        "final_logit_softcapping": optional_number("final_logit_softcapping"),
        "query_pre_attn_scalar": _attention_scalar(62),
    },
    norm_offset=1.0,
)

GEMMA_EMBEDDING = replace(
    GEMMA3,
    model_class="Gemma3TextModel",
    fields={**GEMMA3.fields, "use_bidirectional_attention": constant(True)},
    is_encoder=True,
)
