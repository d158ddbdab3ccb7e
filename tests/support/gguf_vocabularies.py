"""Tokenizers as llama.cpp's converters write them into the metadata of a GGUF file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tokenizers import Tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)

Metadata = dict[str, Any]


def byte_level_bpe(backend: Tokenizer, pre: str, padding: int = 0, **ids: int) -> Metadata:
    """Return the metadata of a byte-level BPE; `ids` are named as in the metadata, as `bos_token_id`."""
    state = json.loads(backend.to_str())
    added = {token["id"]: token for token in state["added_tokens"]}
    tokens = [str(backend.id_to_token(index)) for index in range(backend.get_vocab_size())]
    types = [NORMAL] * len(tokens)
    for index, token in added.items():
        types[index] = CONTROL if token["special"] else USER_DEFINED
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in state["model"]["merges"]]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens + [f"[PAD{len(tokens) + index}]" for index in range(padding)],
        "tokenizer.ggml.token_type": types + [UNUSED] * padding,
        "tokenizer.ggml.merges": merges,
        **{f"tokenizer.ggml.{name}": index for name, index in ids.items()},
    }


def sentencepiece(pieces: Mapping[str, float], user_defined: tuple[str, ...] = (), **fields: Any) -> Metadata:
    """Return the metadata of a SentencePiece model: unknown, bos, eos, the bytes, tokens of the user, `pieces`.

    `pieces` have scores, which the tokens of the user lost. `fields` are named as in the metadata.
    """
    head = {"<unk>": UNKNOWN, "<s>": CONTROL, "</s>": CONTROL}
    head |= {f"<0x{byte:02X}>": BYTE for byte in range(256)}
    head |= {token.replace("\u2581", " "): USER_DEFINED for token in user_defined}
    scores = [-1000.0 if kind == USER_DEFINED else 0.0 for kind in head.values()]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [*head, *pieces],
        "tokenizer.ggml.scores": scores + list(pieces.values()),
        "tokenizer.ggml.token_type": [*head.values(), *[NORMAL] * len(pieces)],
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        **{f"tokenizer.ggml.{name}": value for name, value in fields.items()},
    }


def word_pieces(backend: Tokenizer, **fields: Any) -> Metadata:
    """Return the metadata of WordPiece: pieces within words lose their marks, and those at the begin get one."""
    state = json.loads(backend.to_str())
    tokens = [str(backend.id_to_token(index)) for index in range(backend.get_vocab_size())]
    control = {token["content"] for token in state["added_tokens"]}
    stored = [
        token if token in control else token[2:] if token.startswith("##") else f"\u2581{token}" for token in tokens
    ]
    ids = {name: tokens.index(token) for name, token in _BERT_TOKENS.items() if token in tokens}
    return {
        "general.architecture": "bert",
        "tokenizer.ggml.model": "bert",
        "tokenizer.ggml.pre": "jina-v2-en",
        "tokenizer.ggml.tokens": stored,
        "tokenizer.ggml.token_type": [CONTROL if token in control else NORMAL for token in tokens],
        "tokenizer.ggml.token_type_count": 2,
        **{f"tokenizer.ggml.{name}": value for name, value in (ids | fields).items()},
    }


_BERT_TOKENS = {
    "unknown_token_id": "[UNK]", "seperator_token_id": "[SEP]", "padding_token_id": "[PAD]", "cls_token_id": "[CLS]",
    "bos_token_id": "[CLS]", "eos_token_id": "[SEP]",
}  # fmt: skip


def unigram(pieces: list[tuple[str, float]], charsmap: bytes = b"", **fields: Any) -> Metadata:
    """Return the metadata of XLM-RoBERTa's unigram model; `pieces` begin with <s>, <pad>, </s> and <unk>."""
    types = [CONTROL, CONTROL, CONTROL, UNKNOWN] + [NORMAL] * (len(pieces) - 5) + [CONTROL]
    return {
        "general.architecture": "bert",
        "tokenizer.ggml.model": "t5",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [token for token, _ in pieces],
        "tokenizer.ggml.scores": [score for _, score in pieces],
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.add_space_prefix": True,
        "tokenizer.ggml.token_type_count": 1,
        "tokenizer.ggml.remove_extra_whitespaces": False,
        **({"tokenizer.ggml.precompiled_charsmap": list(charsmap)} if charsmap else {}),
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 3,
        "tokenizer.ggml.seperator_token_id": 2,
        "tokenizer.ggml.padding_token_id": 1,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_sep_token": True,
        "tokenizer.ggml.add_eos_token": True,
        **{f"tokenizer.ggml.{name}": value for name, value in fields.items()},
    }
