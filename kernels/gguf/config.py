"""The config.json and generation_config.json of a GGUF file, and how its hidden states are pooled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.kernels.errors import ModelError
from quire.kernels.gguf.architectures import ARCHITECTURES, architecture_of
from quire.kernels.gguf.container import GgufModel
from quire.kernels.gguf.metadata import FLOAT_TYPES, Metadata
from quire.kernels.gguf.parts import parts_of
from quire.kernels.gguf.sampling import sampling_of

METHOD = "gguf"
"""`quant_method` in config.json."""

_ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")
_END_TEXTS = {
    "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>", "<|endoftext|>",
    "<|end_of_text|>", "<EOT>", "<eos>", "<turn|>", "<\uff5cend\u2581of\u2581sentence\uff5c>", "</s>",
}  # fmt: skip
_CONTROL = 3  # in tokenizer.ggml.token_type
_GENERAL_TYPES = {
    "adapter": "an adapter such as a LoRA; give its model, and the adapter by --lora-modules NAME=FILE",
    "mmproj": "the projector of a multimodal model, whose text part is another file; give that one",
    "imatrix": "an importance matrix for quantization, not a model",
}
_POOLING = {1: "mean", 2: "cls", 3: "lasttoken"}
_NO_POOLING, _RANK = 0, 4


def config_of(model: GgufModel) -> dict[str, Any]:
    """Return the fields of config.json. Raises ModelError for an architecture or a field that is not supported."""
    metadata = Metadata(model.metadata, model.tensors)
    _check_kind(metadata)
    architecture = architecture_of(metadata)
    if not metadata.has("token_embd.weight"):
        raise ModelError("the GGUF file lacks tensor token_embd.weight; it holds no language model, or part of one")
    fields = {name: field(metadata) for name, field in architecture.fields.items()}
    parts = (part for part in parts_of(model) if part.type not in FLOAT_TYPES and not part.is_always_float)
    types = {part.module: part.type for part in parts}
    if metadata.flag("attention.causal", not architecture.is_encoder) == architecture.is_encoder:
        raise metadata.unsupported("attention.causal", f"it must be {str(not architecture.is_encoder).lower()}")
    _pooling_type(metadata)
    metadata.check_all_read()
    return {
        "architectures": [architecture.model_class],
        **fields,
        "quantization_config": {"quant_method": METHOD, "types": types} if types else None,
    }


def generation_config_of(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of generation_config.json: every token that ends an answer, and how to sample.

    Those of chats that files do not name are known by their texts, as in llama.cpp: it also does not take `<|end|>`,
    which ends messages, for one if there is `<|return|>`. Raises ModelError for a bad sampling parameter.
    """
    ids = {id_ for name in _ENDS if type(id_ := metadata.get(f"tokenizer.ggml.{name}")) is int}
    tokens, types = metadata.get("tokenizer.ggml.tokens"), metadata.get("tokenizer.ggml.token_type")
    if isinstance(tokens, list) and isinstance(types, list):
        texts = {text: id_ for id_, (text, kind) in enumerate(zip(tokens, types, strict=False)) if kind == _CONTROL}
        ends = _END_TEXTS - ({"<|end|>"} if "<|return|>" in texts else set())
        ids |= {id_ for text, id_ in texts.items() if text in ends}
    return {"eos_token_id": sorted(ids), **sampling_of(metadata)}


def pooling_files_of(model: GgufModel) -> dict[str, Any]:
    """Return the files that sentence-transformers has beside a model, by their paths; none without a pooling type.

    Embeddings are normalized, as llama.cpp does it: files do not say whether the model has a layer for that.
    """
    mode = _POOLING.get(_pooling_type(Metadata(model.metadata, model.tensors)))
    if mode is None:
        return {}
    modules = ({"type": "Transformer"}, {"type": "Pooling", "path": "1_Pooling"}, {"type": "Normalize"})
    return {"modules.json": modules, "1_Pooling/config.json": {"pooling_mode": mode}}


def _pooling_type(metadata: Metadata) -> int:
    value = metadata.own("pooling_type")
    if value is not None and value not in (_NO_POOLING, _RANK, *_POOLING):
        raise metadata.unsupported("pooling_type", "it must be 0 (none), 1 (mean), 2 (cls), 3 (last) or 4 (rank)")
    return value or _NO_POOLING


def _check_kind(metadata: Metadata) -> None:
    """Raise ModelError for a file that is not a model."""
    kind = metadata.get("general.type")
    if metadata.architecture == "clip":
        kind = "mmproj"
    if isinstance(kind, str) and kind in _GENERAL_TYPES:
        raise ModelError(f"the GGUF file is {_GENERAL_TYPES[kind]}")


__all__ = ["ARCHITECTURES", "METHOD", "config_of", "generation_config_of", "pooling_files_of"]
