"""A lower bound of the number of tokens of a text, which costs next to nothing where tokenizing would take seconds."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer as Backend

from quire.frontend.text.token_bytes import byte_of_char

Component = Mapping[str, Any]  # of tokenizer.json

_SHRINKS = {"NFC": 4, "NFD": 4, "NFKC": 4, "NFKD": 4, "Lowercase": 3, "Prepend": 1, "ByteLevel": 1}
"""Normalizers, and by what factor at most they shorten the UTF-8 of a text."""

_KEEP_ASCII = {"NFC", "NFD", "NFKC", "NFKD"}
_KEEP_ALL = {"ByteLevel", "Digits", "FixedLength", "Metaspace", "Punctuation", "Split", "UnicodeScripts"}
_BYTES_AT_ONCE = 1 << 18


class FewestTokens:
    """Counts the tokens that a text has at least: no token stands for more bytes than the longest of the vocabulary.

    Where tokens stand for the text's own bytes, a byte `b` counts 1 / (length of the longest token that contains `b`):
    the bytes of any token then add up to at most 1. Long tokens are mostly runs of one character, so this bound of
    words is much nearer than the first.

    `is_sound` is False for a tokenizer that may drop or join any amount of text, as by removing white space, by one
    unknown token for many characters, or by tokens that take the space around them. For it there is no bound.
    """

    def __init__(self, backend: Backend) -> None:
        normalizers = _parts(backend.normalizer, "normalizers")
        pre_tokenizers = _parts(backend.pre_tokenizer, "pretokenizers")
        added = backend.get_added_tokens_decoder().values()
        vocabulary = backend.get_vocab(with_added_tokens=False)
        shrinks = [_shrink(part) for part in normalizers]
        is_byte_level = any(part["type"] == "ByteLevel" for part in (*normalizers, *pre_tokenizers))
        self.is_sound = (
            None not in shrinks
            and all(part["type"] in _KEEP_ALL and part.get("behavior") != "Removed" for part in pre_tokenizers)
            and not any(token.lstrip or token.rstrip for token in added)
            and _has_all_bytes(backend.model, vocabulary, is_byte_level)
        )
        if not self.is_sound:
            return
        texts = [token.content.encode() for token in added]
        tokens = [_alphabet_bytes(token) for token in vocabulary] if is_byte_level else map(str.encode, vocabulary)
        longest = _longest_with_each_byte([*tokens, *texts])
        self._longest = math.prod(shrink or 1 for shrink in shrinks) * int(longest.max())
        self._weights = 1 / np.maximum(longest, 1)
        self._keeps_bytes = is_byte_level and not normalizers
        self._keeps_ascii = is_byte_level and all(part["type"] in _KEEP_ASCII for part in normalizers)

    def __call__(self, text: str) -> int:
        """Return the number of tokens that `text` has at least; 0 without a bound."""
        if not self.is_sound:
            return 0
        data = text.encode(errors="surrogatepass")  # a lone surrogate is not ours to report
        if not (self._keeps_bytes or (self._keeps_ascii and text.isascii())):
            return len(data) // self._longest
        counts = np.zeros(256, np.int64)
        for start in range(0, len(data), _BYTES_AT_ONCE):
            part = np.frombuffer(data, np.uint8, min(_BYTES_AT_ONCE, len(data) - start), start)
            counts += np.bincount(part, minlength=256)
        return math.floor(float(counts @ self._weights) * (1 - 1e-9))  # not above it by a rounding error


def _parts(component: Any, members: str) -> list[Component]:
    """Return the parts of a normalizer or pre-tokenizer, in the form of tokenizer.json."""
    if component is None:
        return []
    waiting, parts = [json.loads(component.__getstate__())], list[Component]()
    while waiting:
        part = waiting.pop()
        if part["type"] == "Sequence":
            waiting += part[members]
        else:
            parts.append(part)
    return parts


def _shrink(normalizer: Component) -> int | None:
    """Return the factor by which a normalizer shortens a text at most, None if there is none."""
    if normalizer["type"] != "Replace":
        return _SHRINKS.get(normalizer["type"])
    pattern = normalizer["pattern"].get("String")
    return 1 if pattern is not None and len(normalizer["content"].encode()) >= len(pattern.encode()) else None


def _has_all_bytes(model: Any, vocabulary: Mapping[str, int], is_byte_level: bool) -> bool:
    """Return True if every byte has a token, so that no text is unknown to the model."""
    if type(model).__name__ not in ("BPE", "Unigram"):
        return False
    if is_byte_level:
        return all(char in vocabulary for char in byte_of_char())
    return bool(getattr(model, "byte_fallback", False)) and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))


def _alphabet_bytes(token: str) -> bytes:
    alphabet = byte_of_char()
    try:
        return bytes([alphabet[char] for char in token])
    except KeyError:
        return token.encode()


def _longest_with_each_byte(tokens: Iterable[bytes]) -> NDArray[np.int64]:
    """Return [256], the length of the longest of the tokens that contain each byte; 0 for a byte in none of them."""
    longest, unseen = np.zeros(256, np.int64), set(range(256))
    for token in sorted(tokens, key=len, reverse=True):
        if found := unseen.intersection(token):
            longest[list(found)] = len(token)
            unseen -= found
    return longest
