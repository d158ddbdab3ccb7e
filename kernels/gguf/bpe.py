"""The tokenizers of byte-level BPE (`gpt2`) and of SentencePiece's BPE with byte fallback (`llama`)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from quire.kernels.gguf.pre_tokenizers import PreTokenizer, byte_level
from quire.kernels.gguf.vocabulary import NORMAL, SPACE, USER_DEFINED, Component, Vocabulary, value, values

_LONGEST_PIECE = 1024


def byte_level_bpe(metadata: Mapping[str, Any], vocabulary: Vocabulary, words: PreTokenizer) -> Component:
    """Return the components of a byte-level BPE."""
    return {
        "normalizer": words.normalizer(),
        "pre_tokenizer": words.steps(),
        "decoder": byte_level(),
        "model": _bpe(vocabulary, _merges(metadata, vocabulary), ignore_merges=words.ignore_merges),
    }


def sentencepiece(
    metadata: Mapping[str, Any], vocabulary: Vocabulary, unk_token: str | None, *, prefix: bool = True
) -> Component:
    """Return the components of SentencePiece's BPE; `prefix` puts a space before a text that the file is silent on."""
    prefix = value(metadata, "tokenizer.ggml.add_space_prefix", bool, prefix)
    given = "tokenizer.ggml.merges" in metadata
    merges = _merges(metadata, vocabulary) if given else _merges_by_score(metadata, vocabulary)
    prepend = [{"type": "Prepend", "prepend": SPACE}] if prefix else []
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*prepend, _replace(" ", SPACE)]},
        "pre_tokenizer": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [_replace(SPACE, " "), {"type": "ByteFallback"}, {"type": "Fuse"}, *strip],
        },
        "model": _bpe(vocabulary, merges, unk_token=unk_token, fuse_unk=True, byte_fallback=True),
    }


def _replace(old: str, new: str) -> Component:
    return {"type": "Replace", "pattern": {"String": old}, "content": new}


def _bpe(vocabulary: Vocabulary, merges: list[tuple[str, str]], **fields: Any) -> Component:
    defaults = {
        "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
        "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
    }  # fmt: skip
    return {"type": "BPE", **defaults, **fields, "vocab": vocabulary.ids, "merges": merges}


def _merges(metadata: Mapping[str, Any], vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """Return the merges that the file lists, best first."""
    merges = []
    for index, merge in enumerate(values(metadata, "tokenizer.ggml.merges", str)):
        left, _, right = merge.partition(" ")
        if left not in vocabulary.ids or right not in vocabulary.ids or left + right not in vocabulary.ids:
            raise ValueError(
                f"tokenizer.ggml.merges has {merge[:40]!r} as merge {index}, which is not two tokens, with a space "
                "between them, that make a third one"
            )
        merges.append((left, right))
    return merges


def _merges_by_score(metadata: Mapping[str, Any], vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """Return the merges of a SentencePiece model, which has scores instead: every pair that makes a token, best first.

    Of pairs with equal scores, the one with the longer left part goes first, as in the conversion of `transformers`.
    User-defined tokens go before all: so runs of spaces become the longest token there is.
    """
    scores = values(metadata, "tokenizer.ggml.scores", float)
    if len(scores) < len(vocabulary.tokens) or not all(map(math.isfinite, scores)):
        raise ValueError(
            f"tokenizer.ggml.scores has {len(scores)} scores for {len(vocabulary.tokens)} tokens; "
            "each token needs one, which is a finite number"
        )
    longest = max(vocabulary.tokens, key=len, default="")
    if len(longest) > _LONGEST_PIECE:  # all ways to divide it take quadratic time
        raise ValueError(
            f"tokenizer.ggml.tokens has a token of {len(longest)} characters, {longest[:20]!r}...; "
            f"a SentencePiece model has at most {_LONGEST_PIECE}"
        )
    ranks = {NORMAL: 0, USER_DEFINED: 1}
    pieces = {token: id_ for token, id_ in vocabulary.ids.items() if vocabulary.types[id_] in ranks}
    found = [
        (ranks[vocabulary.types[id_]], scores[id_], cut, len(token) - cut, -id_)
        for token, id_ in pieces.items()
        for cut in range(1, len(token))
        if token[:cut] in pieces and token[cut:] in pieces
    ]
    if len(found) > 1 and len({score for _, score, *_ in found}) == 1:
        raise ValueError(
            f"tokenizer.ggml.scores are all {found[0][1]}, which does not tell the order of merges; "
            "convert the model again, from its tokenizer.model"
        )
    found.sort(reverse=True)
    pairs = [(vocabulary.tokens[-negative], cut) for _, _, cut, _, negative in found]
    return [(token[:cut], token[cut:]) for token, cut in pairs]
