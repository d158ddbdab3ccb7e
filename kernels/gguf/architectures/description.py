"""Descriptions of architectures in GGUF: a class of `transformers`, fields of config.json, names of tensors.

A description is data. Its fields are functions of the metadata, most of them made by the small ones here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from quire.kernels.errors import ModelError
from quire.kernels.gguf.metadata import Metadata

Field = Callable[[Metadata], Any]
Names = Mapping[str, str]

_LINEAR_SCALING = ("linear", "yarn")
MOST_LAYERS = 1000
"""Layers of a model that can be loaded."""


@dataclass(frozen=True)
class Architecture:
    """An architecture of GGUF files.

    `model_class` is the class that config.json names. `names` maps names of tensors, without `.weight` and `.bias`, to
    those in a model folder, where those with another end have none; `*` is the number of a layer, and then that of an
    expert. Tensors of `used` are read for `fields`. `permuted`: rows 2 j and 2 j + 1 of each head of q and k are j and
    j + dim/2 of a model folder. `norm_offset` is what the conversion has added to the weights of norms. An encoder
    attends to later tokens too. Of `variants` the first whose condition a file meets describes it instead. `scalars`
    are keys with a number for each layer that is a tensor of one element, of this name and shape, in a model folder.
    `head_layer` is the layer for multi-token prediction in a model folder, which follows the others in the file; "" if
    it is not read.
    """

    model_class: str
    names: Names
    fields: Mapping[str, Field]
    used: tuple[str, ...] = ()
    permuted: bool = False
    norm_offset: float = 0.0
    is_encoder: bool = False
    variants: tuple[tuple[Callable[[Metadata], bool], Architecture], ...] = ()
    scalars: Mapping[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    head_layer: str = ""


def size(key: str, default: int | None = None) -> Field:
    """Return the field that is the size in `key`."""
    return lambda metadata: metadata.size(key, default)


def optional_size(key: str) -> Field:
    """Return the field that is the size in `key`, null where the key is missing or 0."""
    return lambda metadata: metadata.size(key) if metadata.own(key) else None


def number(key: str, default: float | None = None) -> Field:
    """Return the field that is the number in `key`."""
    return lambda metadata: metadata.number(key, default)


def optional_number(key: str) -> Field:
    """Return the field that is the number in `key`, null where the key is missing or 0."""
    return lambda metadata: metadata.number(key) if metadata.own(key) else None


def constant(value: Any) -> Field:
    """Return the field that all models of the architecture have."""
    return lambda metadata: value


def has(tensor: str) -> Field:
    """Return the field that says whether there is a tensor."""
    return lambda metadata: metadata.has(tensor)


def is_tied(metadata: Metadata) -> bool:
    """Return `tie_word_embeddings`."""
    return not metadata.has("output.weight")


def vocab_size(metadata: Metadata) -> int:
    """Return `vocab_size`, the rows of the embedding."""
    return metadata.tensors["token_embd.weight"].shape[0]


def layer_count(metadata: Metadata) -> int:
    """Return `num_hidden_layers`, without the layers for multi-token prediction, which follow them."""
    layers = metadata.size("block_count")
    more = metadata.size("nextn_predict_layers") if metadata.own("nextn_predict_layers") else 0
    if more >= layers:
        raise metadata.unsupported("nextn_predict_layers", f"it must be below the {layers} layers of block_count")
    if layers - more > MOST_LAYERS:
        raise metadata.unsupported("block_count", f"it must be at most {MOST_LAYERS}")
    return layers - more


def heads(metadata: Metadata) -> int:
    """Return `num_attention_heads`."""
    return metadata.size("attention.head_count")


def kv_heads(metadata: Metadata) -> int:
    """Return `num_key_value_heads`. The key may be a list, with 0 for layers without attention."""
    key = "attention.head_count_kv"
    if not isinstance(metadata.own(key), list):
        return metadata.size(key, heads(metadata))
    counts = set(metadata.counts(key, layer_count(metadata))) - {0}
    if len(counts) > 1:
        raise metadata.unsupported(key, "it must be the same for all layers that have attention")
    return counts.pop() if counts else heads(metadata)


def attention_layers(metadata: Metadata) -> list[bool]:
    """Return for each layer whether it has attention: one has no KV heads if it keeps a state instead."""
    return [count > 0 for count in metadata.counts("attention.head_count_kv", layer_count(metadata))]


def head_size(metadata: Metadata) -> int:
    """Return the elements of a head. Raises ModelError if those of keys and values differ."""
    dim = metadata.size("attention.key_length", max(1, metadata.size("embedding_length") // heads(metadata)))
    if metadata.size("attention.value_length", dim) != dim:
        raise metadata.unsupported("attention.value_length", f"it must be {dim}, as attention.key_length")
    return dim


def rotated_head_size(metadata: Metadata) -> int:
    """Return `head_dim` of an architecture that rotates whole heads."""
    dim = head_size(metadata)
    if metadata.size("rope.dimension_count", dim) != dim:
        raise metadata.unsupported("rope.dimension_count", f"it must be {dim}, the size of a head")
    return dim


def rotated_part(metadata: Metadata) -> float:
    """Return `partial_rotary_factor`, the part of a head that is rotated."""
    dim = head_size(metadata)
    rotated = metadata.size("rope.dimension_count", dim)
    if rotated > dim or rotated % 2:
        raise metadata.unsupported("rope.dimension_count", f"it must be even, and at most {dim}, the size of a head")
    part = rotated / dim
    return part if int(dim * part) == rotated else math.nextafter(part, 1)


def rope_scaling(metadata: Metadata) -> dict[str, Any] | None:
    """Return `rope_scaling`. Where the file has factors of frequencies, they stand for the parameters."""
    length = metadata.size("context_length")
    if metadata.has("rope_freqs.weight"):  # of llama3's scaling
        values = metadata.factors("rope_freqs.weight")
        return {
            "rope_type": "longrope", "short_factor": values, "long_factor": values, "attention_factor": 1.0,
            "original_max_position_embeddings": length,
        }  # fmt: skip
    if metadata.has("rope_factors_long.weight") and metadata.has("rope_factors_short.weight"):
        metadata.own("rope.scaling.type")
        return {
            "rope_type": "longrope",
            "short_factor": metadata.factors("rope_factors_short.weight"),
            "long_factor": metadata.factors("rope_factors_long.weight"),
            "attention_factor": metadata.number("rope.scaling.attn_factor", 1.0),
            "original_max_position_embeddings": metadata.size("rope.scaling.original_context_length", length),
        }
    kind = metadata.own("rope.scaling.type")
    if kind is None and metadata.own("rope.scale_linear") is not None:  # of files before 2023-10
        return {"rope_type": "linear", "factor": metadata.number("rope.scale_linear")}
    if kind in (None, "none"):
        return None
    if kind not in _LINEAR_SCALING:
        raise metadata.unsupported("rope.scaling.type", f"supported are none, {', '.join(_LINEAR_SCALING)}")
    scaling = {"rope_type": kind, "factor": metadata.number("rope.scaling.factor")}
    return scaling | _yarn(metadata, length) if kind == "yarn" else scaling


def _yarn(metadata: Metadata, length: int) -> dict[str, Any]:
    optional = {
        "attention_factor": "rope.scaling.yarn_attn_factor", "beta_fast": "rope.scaling.yarn_beta_fast",
        "beta_slow": "rope.scaling.yarn_beta_slow",
    }  # fmt: skip
    if metadata.number("rope.scaling.yarn_ext_factor", 1.0) != 1:
        raise metadata.unsupported("rope.scaling.yarn_ext_factor", "it must be 1")
    return {
        "original_max_position_embeddings": metadata.size("rope.scaling.original_context_length", length),
        **{name: metadata.number(key) for name, key in optional.items() if metadata.own(key) is not None},
    }


def sliding_window(metadata: Metadata) -> int | None:
    """Return `sliding_window`, null for none."""
    return metadata.size("attention.sliding_window") if metadata.own("attention.sliding_window") else None


def layer_types(period: int) -> Field:
    """Return the field `layer_types`: a window in all layers but each `period`-th, unless the file has a pattern."""

    def types(metadata: Metadata) -> list[str]:
        count, key = layer_count(metadata), "attention.sliding_window_pattern"
        given = metadata.own(key)
        if isinstance(given, list):
            sliding = metadata.flags(key, count)
        else:
            every = metadata.size(key, period)
            sliding = [(layer + 1) % every != 0 for layer in range(count)]
        return ["sliding_attention" if slides else "full_attention" for slides in sliding]

    return types


def check_off(key: str, problem: str) -> Field:
    """Return a field that is null, and an error where `key` is set to something else than 0."""

    def check(metadata: Metadata) -> None:
        if metadata.own(key):
            raise metadata.unsupported(key, problem)

    return check


def ignored(*keys: str) -> Field:
    """Return a field that is null; `keys` change nothing in the architecture."""

    def read(metadata: Metadata) -> None:
        for key in keys:
            metadata.own(key)

    return read


def has_any(end: str) -> Field:
    """Return the field that says whether there is a tensor with this end of its name."""
    return lambda metadata: any(name.endswith(end) for name in metadata.tensors)


COMMON: dict[str, Field] = {
    "vocab_size": vocab_size,
    "hidden_size": size("embedding_length"),
    "num_hidden_layers": layer_count,
    "num_attention_heads": heads,
    "max_position_embeddings": size("context_length"),
}
"""Fields of all models."""

DECODER: dict[str, Field] = {
    **COMMON,
    "intermediate_size": size("feed_forward_length"),
    "num_key_value_heads": kv_heads,
    "head_dim": rotated_head_size,
    "rms_norm_eps": number("attention.layer_norm_rms_epsilon"),
    "rope_theta": number("rope.freq_base", 10000.0),
    "rope_scaling": rope_scaling,
    "tie_word_embeddings": is_tied,
}
"""Fields of decoders with RMSNorm and rotary embeddings."""

PARTIAL_ROTARY: dict[str, Field] = {"head_dim": head_size, "partial_rotary_factor": rotated_part}
"""Fields of decoders that rotate a part of each head."""

ATTENTION_BIAS: dict[str, Field] = {"attention_bias": has("blk.0.attn_q.bias")}

MLP_BIAS: dict[str, Field] = {"mlp_bias": has("blk.0.ffn_gate.bias")}

ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that `rope_scaling` reads."""

DECODER_NAMES: Names = {
    "token_embd": "model.embed_tokens", "output": "lm_head", "output_norm": "model.norm",
    "blk.*.attn_norm": "model.layers.*.input_layernorm",
    "blk.*.attn_q": "model.layers.*.self_attn.q_proj", "blk.*.attn_k": "model.layers.*.self_attn.k_proj",
    "blk.*.attn_v": "model.layers.*.self_attn.v_proj", "blk.*.attn_output": "model.layers.*.self_attn.o_proj",
    "blk.*.attn_qkv": "model.layers.*.self_attn.qkv_proj",
    "blk.*.ffn_norm": "model.layers.*.post_attention_layernorm",
    "blk.*.ffn_gate": "model.layers.*.mlp.gate_proj", "blk.*.ffn_up": "model.layers.*.mlp.up_proj",
    "blk.*.ffn_down": "model.layers.*.mlp.down_proj",
}  # fmt: skip
"""Names of decoders like Llama."""

HEAD_NORM_NAMES: Names = {
    "blk.*.attn_q_norm": "model.layers.*.self_attn.q_norm", "blk.*.attn_k_norm": "model.layers.*.self_attn.k_norm",
}  # fmt: skip

EXPERT_NAMES: Names = {
    "blk.*.ffn_gate_inp": "model.layers.*.mlp.gate",
    "blk.*.ffn_gate_exps": "model.layers.*.mlp.experts.*.gate_proj",
    "blk.*.ffn_up_exps": "model.layers.*.mlp.experts.*.up_proj",
    "blk.*.ffn_down_exps": "model.layers.*.mlp.experts.*.down_proj",
    "blk.*.ffn_gate_up_exps": "model.layers.*.mlp.experts.*.gate_up_proj",
}  # fmt: skip
"""Names of experts, which are stacked in the file."""


CORRECTED_EXPERT_NAMES: Names = {
    **EXPERT_NAMES,
    "blk.*.exp_probs_b": "model.layers.*.mlp.gate.e_score_correction_bias",
    "blk.*.ffn_gate_shexp": "model.layers.*.mlp.shared_experts.gate_proj",
    "blk.*.ffn_up_shexp": "model.layers.*.mlp.shared_experts.up_proj",
    "blk.*.ffn_down_shexp": "model.layers.*.mlp.shared_experts.down_proj",
}
"""Names of experts, shared ones, and the correction of their scores, as in DeepSeek-V3."""


LAYER = "model.layers.*"

HEAD_NAMES: Names = {
    "blk.*.nextn.eh_proj": f"{LAYER}.eh_proj", "blk.*.nextn.enorm": f"{LAYER}.enorm",
    "blk.*.nextn.hnorm": f"{LAYER}.hnorm", "blk.*.nextn.shared_head_norm": f"{LAYER}.shared_head.norm",
}  # fmt: skip
"""Names of what a layer for multi-token prediction has besides those of a layer, in GLM-4.5 and DeepSeek-V3."""


def without(names: Names, *removed: str) -> Names:
    """Return names without those that an architecture does not have."""
    missing = set(removed) - names.keys()
    if missing:
        raise ModelError(f"{', '.join(missing)} are not among the names")
    return {name: folder for name, folder in names.items() if name not in removed}
