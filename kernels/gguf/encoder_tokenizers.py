"""The tokenizers of encoders: WordPiece (`bert`) and SentencePiece's unigram model (`t5`, that of XLM-RoBERTa)."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from quire.kernels.gguf.vocabulary import NORMAL, SPACE, Component, Vocabulary, value, values

_CHARSMAP = "tokenizer.ggml.precompiled_charsmap"
_LEAF, _VALUE = 1 << 8, 1 << 31  # bits of a unit of the trie: it has a value; it is one


def word_pieces(metadata: Mapping[str, Any], vocabulary: Vocabulary, unk_token: str | None) -> Component:
    """Return the components of WordPiece with BERT's normalizer.

    Older files do not say whether texts become lower case: then they do if no token has a capital letter.
    """
    if unk_token is None:
        raise ValueError("tokenizer.ggml.unknown_token_id names no token, which WordPiece needs")
    cased = any(
        token != token.lower()
        for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True)
        if kind == NORMAL
    )
    strips = metadata.get("tokenizer.ggml.normalizer.strip_accents")
    return {
        "normalizer": {
            "type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True,
            "strip_accents": strips if isinstance(strips, bool) else None,
            "lowercase": value(metadata, "tokenizer.ggml.normalizer.lowercase", bool, not cased),
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {
            "type": "WordPiece", "unk_token": unk_token, "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100, "vocab": vocabulary.ids,
        },
    }  # fmt: skip


def unigram(metadata: Mapping[str, Any], vocabulary: Vocabulary, unk_token: str | None) -> Component:
    """Return the components of SentencePiece's unigram model, which joins and strips white space.

    `remove_extra_whitespaces` is not asked: converters may write another field of tokenizer_config.json there.
    """
    if unk_token is None:
        raise ValueError("tokenizer.ggml.unknown_token_id names no token, which a unigram model needs")
    scores = values(metadata, "tokenizer.ggml.scores", float)
    if len(scores) < len(vocabulary.tokens) or not all(map(math.isfinite, scores)):
        raise ValueError(
            f"tokenizer.ggml.scores has {len(scores)} scores for {len(vocabulary.tokens)} tokens; "
            "each token needs one, which is a finite number"
        )
    prepends = value(metadata, "tokenizer.ggml.add_space_prefix", bool, True)
    metaspace = {
        "type": "Metaspace", "replacement": SPACE, "prepend_scheme": "always" if prepends else "never", "split": True
    }  # fmt: skip
    return {
        "normalizer": _charsmap(metadata),
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, metaspace]},
        "decoder": metaspace,
        "model": {
            "type": "Unigram", "unk_id": vocabulary.ids[unk_token], "byte_fallback": False,
            "vocab": list(zip(vocabulary.tokens, scores, strict=False)),
        },
    }  # fmt: skip


def adds_separator(metadata: Mapping[str, Any]) -> bool:
    """Return True if the two texts of a pair have another separator between them than the end of the first one."""
    is_bert: bool = metadata.get("tokenizer.ggml.model") == "bert"
    return value(metadata, "tokenizer.ggml.add_sep_token", bool, not is_bert)


def _charsmap(metadata: Mapping[str, Any]) -> Component | None:
    """Return the normalizer by SentencePiece's map of characters, which is a trie and the texts of its values."""
    if not metadata.get(_CHARSMAP):
        return None
    given = values(metadata, _CHARSMAP, int)
    if not all(-128 <= entry < 256 for entry in given):
        raise ValueError(f"{_CHARSMAP} has items that are not bytes")
    content = bytes(entry & 255 for entry in given)
    size = int.from_bytes(content[:4], "little")
    if (
        size % 4
        or size > len(content) - 4
        or not _is_sound(np.frombuffer(content, "<u4", size // 4, 4), content[4 + size :])
    ):
        raise ValueError(f"{_CHARSMAP} is damaged: it does not hold a trie and its texts; convert the model again")
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(content).decode()}


def _is_sound(units: npt.NDArray[np.uint32], texts: bytes) -> bool:
    """Return True if no step in a trie (of Darts-clone) leads out of it, and all of its values begin a text."""
    try:
        texts.decode()
    except UnicodeDecodeError:
        return False
    nodes = np.flatnonzero(units < _VALUE)
    chosen = units[nodes].astype(np.int64)
    targets = nodes ^ ((chosen >> 10) << ((chosen & (1 << 9)) >> 6))
    if not len(units) or ((targets | 255) >= len(units)).any():
        return False
    begins = units[targets[(chosen & _LEAF) != 0]] & (_VALUE - 1)
    starts = np.append((np.frombuffer(texts, np.uint8) & 0xC0) != 0x80, True)  # bytes that begin a character
    return bool((begins < len(starts)).all() and starts[begins].all())
