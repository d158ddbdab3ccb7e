"""Encoders: BERT, as which RoBERTa and XLM-RoBERTa are converted too, and Nomic Embed.

The conversion drops the rows of positions that RoBERTa leaves out, so that its positions begin at row 0 like BERT's.
"""

from __future__ import annotations

from collections.abc import Mapping

from quire.kernels.errors import ModelError
from quire.kernels.gguf.architectures.description import (
    COMMON,
    Architecture,
    Field,
    constant,
    number,
    rotated_head_size,
    size,
)
from quire.kernels.gguf.metadata import Metadata


def _num_types(metadata: Metadata) -> int:
    """Return `type_vocab_size`, the rows of a tensor."""
    found = metadata.tensors.get("token_types.weight")
    if found is None:
        raise ModelError("the GGUF file lacks tensor token_types.weight, which encoders need")
    return found.shape[0]


_FIELDS: Mapping[str, Field] = {
    **COMMON,
    "intermediate_size": size("feed_forward_length"),
    "layer_norm_eps": number("attention.layer_norm_epsilon"),
    "type_vocab_size": _num_types,
}


def _bert_names(prefix: str) -> dict[str, str]:
    layer = f"{prefix}.encoder.layer.*"
    return {
        "token_embd": f"{prefix}.embeddings.word_embeddings",
        "position_embd": f"{prefix}.embeddings.position_embeddings",
        "token_types": f"{prefix}.embeddings.token_type_embeddings",
        "token_embd_norm": f"{prefix}.embeddings.LayerNorm",
        "blk.*.attn_q": f"{layer}.attention.self.query",
        "blk.*.attn_k": f"{layer}.attention.self.key",
        "blk.*.attn_v": f"{layer}.attention.self.value",
        "blk.*.attn_output": f"{layer}.attention.output.dense",
        "blk.*.attn_output_norm": f"{layer}.attention.output.LayerNorm",
        "blk.*.ffn_up": f"{layer}.intermediate.dense",
        "blk.*.ffn_down": f"{layer}.output.dense",
        "blk.*.layer_output_norm": f"{layer}.output.LayerNorm",
    }


def _labels(metadata: Metadata) -> dict[str, str]:
    """Return `id2label`."""
    count = metadata.tensors["cls.output.weight"].shape[0]
    names = metadata.own("classifier.output_labels")
    if names is None:
        names = [f"LABEL_{number}" for number in range(count)] if count <= _MOST_LABELS else []
    if not isinstance(names, list) or len(names) != count or not all(isinstance(name, str) for name in names):
        raise metadata.unsupported("classifier.output_labels", f"there must be a name for each of {count} labels")
    return {str(number): name for number, name in enumerate(names)}


_MOST_LABELS = 4096
_NO_PADDING = -1  # positions are counted from the row after that of padding

_RERANKER = Architecture(
    "RobertaForSequenceClassification",
    {**_bert_names("roberta"), "cls": "classifier.dense", "cls.output": "classifier.out_proj"},
    {**_FIELDS, "pad_token_id": constant(_NO_PADDING), "id2label": _labels},
    is_encoder=True,
)

BERT = Architecture(
    "BertModel",
    _bert_names("bert"),
    _FIELDS,
    is_encoder=True,
    variants=((lambda metadata: metadata.has("cls.weight") and metadata.has("cls.output.weight"), _RERANKER),),
)

_NOMIC_LAYER = "bert.encoder.layers.*"

NOMIC_BERT = Architecture(
    "NomicBertModel",
    {
        "token_embd": "bert.embeddings.word_embeddings",
        "token_types": "bert.embeddings.token_type_embeddings",
        "token_embd_norm": "bert.emb_ln",
        "blk.*.attn_qkv": f"{_NOMIC_LAYER}.attn.Wqkv",
        "blk.*.attn_output": f"{_NOMIC_LAYER}.attn.out_proj",
        "blk.*.attn_output_norm": f"{_NOMIC_LAYER}.norm1",
        "blk.*.ffn_up": f"{_NOMIC_LAYER}.mlp.fc11",
        "blk.*.ffn_gate": f"{_NOMIC_LAYER}.mlp.fc12",
        "blk.*.ffn_down": f"{_NOMIC_LAYER}.mlp.fc2",
        "blk.*.layer_output_norm": f"{_NOMIC_LAYER}.norm2",
    },
    {**_FIELDS, "head_dim": rotated_head_size, "rope_theta": number("rope.freq_base", 1000.0)},
    is_encoder=True,
)
