"""The vocabulary in the metadata of a GGUF file, and typed access to the keys of its tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 1, 2, 3, 4, 5
"""Types of tokens in `tokenizer.ggml.token_type`; 6 is a byte."""

SPACE = "\u2581"
"""What SentencePiece writes for a space."""

T = TypeVar("T")
Component = dict[str, Any]  # of tokenizer.json


@dataclass(frozen=True)
class Vocabulary:
    """The tokens by id, without the padding at the end, their types, and the id of each."""

    tokens: list[str]
    types: list[int]
    ids: dict[str, int]

    @staticmethod
    def read(metadata: Mapping[str, Any], kind: str) -> Vocabulary:
        """Read the tokens of a tokenizer of a kind. Raises ValueError."""
        tokens = values(metadata, "tokenizer.ggml.tokens", str)
        types = values(metadata, "tokenizer.ggml.token_type", int, len(tokens))
        while types and types[-1] == UNUSED:
            types.pop()
        tokens = [token or f"[EMPTY_{index}]" for index, token in enumerate(tokens[: len(types)])]
        if kind == "llama":
            tokens = _with_marks(tokens, types)
        if kind == "bert":
            tokens = [
                _word_piece(token) if type_ == NORMAL else token for token, type_ in zip(tokens, types, strict=True)
            ]
        ids = {token: index for index, token in enumerate(tokens)}
        if len(ids) < len(tokens):
            index = next(index for index, token in enumerate(tokens) if ids[token] != index)
            raise ValueError(
                f"tokenizer.ggml.tokens has {tokens[index][:40]!r} twice, as token {index} and {ids[tokens[index]]}"
            )
        return Vocabulary(tokens, types, ids)


def _with_marks(tokens: list[str], types: list[int]) -> list[str]:
    """Return the tokens, with user-defined runs of spaces as SentencePiece writes them: converters undo its marks."""
    known = set(tokens)
    marked = [token if token.strip(" ") else SPACE * len(token) for token in tokens]
    return [
        new if kind == USER_DEFINED and new not in known else token
        for token, new, kind in zip(tokens, marked, types, strict=True)
    ]


def _word_piece(token: str) -> str:
    """Return a token as BERT writes it: files mark the begin of words instead of their other pieces."""
    is_begin = token.startswith(SPACE) and len(token) > 1
    return token[1:] if is_begin else f"##{token}"


def value(metadata: Mapping[str, Any], key: str, kind: type[T], default: T | None = None) -> T:
    """Return the value of `key`, which must be of type `kind`, or else `default`."""
    found = metadata.get(key, default)
    if found is None:
        raise ValueError(f"{key} is missing, without which the tokenizer is not known; convert the model again")
    if type(found) is not kind:
        raise ValueError(f"{key} is of type {type(found).__name__}, but must be of type {kind.__name__}")
    return found


def values(metadata: Mapping[str, Any], key: str, kind: type[T], size: int | None = None) -> list[T]:
    """Return a copy of the list `key`, whose items must be of type `kind`, and as many as `size` says."""
    found: list[Any] = list(value(metadata, key, list))
    if not all(type(item) is kind for item in found):
        raise ValueError(f"{key} has items that are not of type {kind.__name__}")
    if size is not None and len(found) != size:
        raise ValueError(f"{key} has {len(found)} items, but there are {size} tokens")
    return found
