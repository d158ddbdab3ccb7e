"""The tokenizer in the metadata of a GGUF file, as the tokenizer.json and tokenizer_config.json of a model folder.

`tokenizer.ggml.model` says which kind it is: `gpt2`, byte-level BPE with a pre-tokenizer (`pre_tokenizers.py`), or
`llama`, SentencePiece's BPE with byte fallback. The format loses which white space added tokens take, and whatever a
tokenizer puts around a text besides bos and eos, such as GLM-4's `[gMASK]<sop>`, which its chat template has too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from quire.kernels.gguf.pre_tokenizers import PreTokenizer, byte_level, pre_tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 1, 2, 3, 4, 5
"""Types of tokens in `tokenizer.ggml.token_type`; 6 is a byte."""

SPECIAL_TOKENS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "sep_token": "seperator_token_id",  # the format spells it so
    "pad_token": "padding_token_id",
    "cls_token": "cls_token_id",
    "mask_token": "mask_token_id",
}
"""Named tokens of tokenizer_config.json, and their keys in the metadata."""

_LLAMA_IDS = {"unk_token": 0, "bos_token": 1, "eos_token": 2}
_NO_TOKEN = 2**32 - 1
_SPACE = "\u2581"
_LONGEST_PIECE = 1024
_PHI3_KEEPS_SPACE = {"<unk>", "<s>", "<|endoftext|>"}

T = TypeVar("T")
Component = dict[str, Any]  # of tokenizer.json


def tokenizer_files(metadata: Mapping[str, Any]) -> dict[str, Component]:
    """Return the contents of tokenizer.json and tokenizer_config.json, by file name.

    `metadata` maps the keys of the file to str, int, float, bool or lists of them. Raises ValueError, in one line, for
    a kind of tokenizer that is not supported, and for keys that are missing or contradict each other.
    """
    kind = _value(metadata, "tokenizer.ggml.model", str)
    if kind not in ("gpt2", "llama"):
        raise ValueError(
            f"tokenizer.ggml.model is {kind[:40]!r}; supported are gpt2 (byte-level BPE) and llama (SentencePiece BPE)"
        )
    vocabulary = _Vocabulary.read(metadata, kind)
    special = _special_tokens(metadata, vocabulary, _LLAMA_IDS if kind == "llama" else {})
    if kind == "llama":
        components, adds_bos = _sentencepiece(metadata, vocabulary, special.get("unk_token")), True
    else:
        words = pre_tokenizer(_value(metadata, "tokenizer.ggml.pre", str))
        components, adds_bos = _byte_level_bpe(metadata, vocabulary, words), words.adds_bos
    ends = {
        "add_bos_token": _adds(metadata, "bos", special, adds_bos),
        "add_eos_token": _adds(metadata, "eos", special, False),
    }
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(vocabulary, _takes_space(metadata, kind)),
        "post_processor": _post_processor(vocabulary, special, **ends),
        **components,
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **special,
        **ends,
        **_chat_template(metadata),
    }
    return {"tokenizer.json": tokenizer, "tokenizer_config.json": config}


@dataclass(frozen=True)
class _Vocabulary:
    """The tokens by id, without the padding at the end, their types, and the id of each."""

    tokens: list[str]
    types: list[int]
    ids: dict[str, int]

    @staticmethod
    def read(metadata: Mapping[str, Any], kind: str) -> _Vocabulary:
        tokens = _values(metadata, "tokenizer.ggml.tokens", str)
        types = _values(metadata, "tokenizer.ggml.token_type", int, len(tokens))
        while types and types[-1] == UNUSED:
            types.pop()
        tokens = [token or f"[EMPTY_{index}]" for index, token in enumerate(tokens[: len(types)])]
        if kind == "llama":
            tokens = _with_marks(tokens, types)
        ids = {token: index for index, token in enumerate(tokens)}
        if len(ids) < len(tokens):
            index = next(index for index, token in enumerate(tokens) if ids[token] != index)
            raise ValueError(
                f"tokenizer.ggml.tokens has {tokens[index][:40]!r} twice, as token {index} and {ids[tokens[index]]}"
            )
        return _Vocabulary(tokens, types, ids)


def _with_marks(tokens: list[str], types: list[int]) -> list[str]:
    """Return the tokens, with user-defined runs of spaces as SentencePiece writes them: converters undo its marks."""
    known = set(tokens)
    marked = [token if token.strip(" ") else _SPACE * len(token) for token in tokens]
    return [
        new if kind == USER_DEFINED and new not in known else token
        for token, new, kind in zip(tokens, marked, types, strict=True)
    ]


def _byte_level_bpe(metadata: Mapping[str, Any], vocabulary: _Vocabulary, words: PreTokenizer) -> Component:
    """Return the components of a byte-level BPE."""
    return {
        "normalizer": words.normalizer(),
        "pre_tokenizer": words.steps(),
        "decoder": byte_level(),
        "model": _bpe(vocabulary, _merges(metadata, vocabulary), ignore_merges=words.ignore_merges),
    }


def _sentencepiece(metadata: Mapping[str, Any], vocabulary: _Vocabulary, unk_token: str | None) -> Component:
    """Return the components of SentencePiece's BPE."""
    prefix = _value(metadata, "tokenizer.ggml.add_space_prefix", bool, True)
    given = "tokenizer.ggml.merges" in metadata
    merges = _merges(metadata, vocabulary) if given else _merges_by_score(metadata, vocabulary)
    prepend = [{"type": "Prepend", "prepend": _SPACE}] if prefix else []
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*prepend, _replace(" ", _SPACE)]},
        "pre_tokenizer": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [_replace(_SPACE, " "), {"type": "ByteFallback"}, {"type": "Fuse"}, *strip],
        },
        "model": _bpe(vocabulary, merges, unk_token=unk_token, fuse_unk=True, byte_fallback=True),
    }


def _replace(old: str, new: str) -> Component:
    return {"type": "Replace", "pattern": {"String": old}, "content": new}


def _bpe(vocabulary: _Vocabulary, merges: list[tuple[str, str]], **fields: Any) -> Component:
    defaults = {
        "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
        "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
    }  # fmt: skip
    return {"type": "BPE", **defaults, **fields, "vocab": vocabulary.ids, "merges": merges}


def _merges(metadata: Mapping[str, Any], vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """Return the merges that the file lists, best first."""
    merges = []
    for index, merge in enumerate(_values(metadata, "tokenizer.ggml.merges", str)):
        left, _, right = merge.partition(" ")
        if left not in vocabulary.ids or right not in vocabulary.ids or left + right not in vocabulary.ids:
            raise ValueError(
                f"tokenizer.ggml.merges has {merge[:40]!r} as merge {index}, which is not two tokens, with a space "
                "between them, that make a third one"
            )
        merges.append((left, right))
    return merges


def _merges_by_score(metadata: Mapping[str, Any], vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """Return the merges of a SentencePiece model, which has scores instead: every pair that makes a token, best first.

    Of pairs with equal scores, the one with the longer left part goes first, as in the conversion of `transformers`.
    User-defined tokens go before all: so runs of spaces become the longest token there is.
    """
    scores = _values(metadata, "tokenizer.ggml.scores", float)
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


def _added_tokens(vocabulary: _Vocabulary, takes_space: bool) -> list[Component]:
    """Return the tokens that are found in a text before it is split into words."""
    return [
        {
            "id": id_, "content": token, "single_word": False, "lstrip": False,
            "rstrip": takes_space and token not in _PHI3_KEEPS_SPACE,
            "normalized": False, "special": vocabulary.types[id_] != USER_DEFINED,
        }
        for token, id_ in vocabulary.ids.items()
        if vocabulary.types[id_] in (UNKNOWN, CONTROL, USER_DEFINED)
    ]  # fmt: skip


def _takes_space(metadata: Mapping[str, Any], kind: str) -> bool:
    """Return True if added tokens take the white space after them, as those of Phi-3 and Phi-3.5 do."""
    return kind == "llama" and metadata.get("general.architecture") == "phi3"


def _special_tokens(
    metadata: Mapping[str, Any], vocabulary: _Vocabulary, defaults: Mapping[str, int]
) -> dict[str, str]:
    """Return the named tokens of tokenizer_config.json."""
    found = {}
    for name, key in SPECIAL_TOKENS.items():
        id_ = _value(metadata, f"tokenizer.ggml.{key}", int, defaults.get(name, _NO_TOKEN))
        if id_ in (-1, _NO_TOKEN):
            continue
        if not 0 <= id_ < len(vocabulary.tokens):
            raise ValueError(f"tokenizer.ggml.{key} is {id_}, but there are {len(vocabulary.tokens)} tokens")
        found[name] = vocabulary.tokens[id_]
    return found


def _adds(metadata: Mapping[str, Any], name: str, special: Mapping[str, str], default: bool) -> bool:
    """Return True if the token `name` (bos or eos) is put around every text."""
    known = f"{name}_token" in special
    adds = _value(metadata, f"tokenizer.ggml.add_{name}_token", bool, default and known)
    if adds and not known:
        raise ValueError(f"tokenizer.ggml.add_{name}_token is true, but tokenizer.ggml.{name}_token_id names no token")
    return adds


def _post_processor(
    vocabulary: _Vocabulary, special: Mapping[str, str], add_bos_token: bool, add_eos_token: bool
) -> Component | None:
    """Return the component that puts bos before and eos after a text, None if it puts neither."""
    before = [special["bos_token"]] if add_bos_token else []
    after = [special["eos_token"]] if add_eos_token else []
    if not before and not after:
        return None

    def around(sequence: str, type_id: int) -> list[Component]:
        kinds = [*(("SpecialToken", token) for token in before), ("Sequence", sequence)]
        kinds += [("SpecialToken", token) for token in after]
        return [{kind: {"id": name, "type_id": type_id}} for kind, name in kinds]

    tokens = {token: {"id": token, "ids": [vocabulary.ids[token]], "tokens": [token]} for token in (*before, *after)}
    single = around("A", 0)
    return {
        "type": "TemplateProcessing", "single": single, "pair": single + around("B", 1), "special_tokens": tokens
    }  # fmt: skip


def _chat_template(metadata: Mapping[str, Any]) -> Component:
    """Return the field `chat_template` of tokenizer_config.json, if there is a template: a text, or all by name."""
    key = "tokenizer.chat_template"
    named = [(name.removeprefix(f"{key}."), name) for name in sorted(metadata) if name.startswith(f"{key}.")]
    main = [("default", key)] if key in metadata else []
    found = [{"name": name, "template": _value(metadata, each, str)} for name, each in main + named]
    if not found:
        return {}
    return {"chat_template": found if named else found[0]["template"]}


def _value(metadata: Mapping[str, Any], key: str, kind: type[T], default: T | None = None) -> T:
    """Return the value of `key`, which must be of type `kind`, or else `default`."""
    value = metadata.get(key, default)
    if value is None:
        raise ValueError(f"{key} is missing, without which the tokenizer is not known; convert the model again")
    if type(value) is not kind:
        raise ValueError(f"{key} is of type {type(value).__name__}, but must be of type {kind.__name__}")
    return value


def _values(metadata: Mapping[str, Any], key: str, kind: type[T], size: int | None = None) -> list[T]:
    """Return a copy of the list `key`, whose items must be of type `kind`, and as many as `size` says."""
    values: list[Any] = list(_value(metadata, key, list))
    if not all(type(value) is kind for value in values):
        raise ValueError(f"{key} has items that are not of type {kind.__name__}")
    if size is not None and len(values) != size:
        raise ValueError(f"{key} has {len(values)} items, but there are {size} tokens")
    return values
