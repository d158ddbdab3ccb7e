"""The bound on the number of tokens: never above what the tokenizer makes, and near it for ordinary text."""

from __future__ import annotations

import math
import sys
import unicodedata
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

from quire.frontend.text.fewest_tokens import FewestTokens
from quire.frontend.text.token_bytes import byte_of_char

Form = Literal["NFC", "NFD", "NFKC", "NFKD"]
WORDS = ["Ġthe", "Ġ" * 16, "Ċ" * 4, "ing"]


def byte_level(normalizer: normalizers.Normalizer | None = None) -> Tokenizer:
    """Return a byte-level BPE whose long tokens are made by merges of equal halves, or letter by letter."""
    vocabulary, merges = dict(byte_of_char()), []
    for word in WORDS:
        for end in range(2, len(word) + 1):
            left, right = word[: end - 1], word[end - 1]
            if left + right not in vocabulary:
                merges.append((left, right))
                vocabulary[left + right] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.add_special_tokens([AddedToken("<|end of the text|>", normalized=False)])
    return tokenizer


def sentencepiece() -> Tokenizer:
    """Return a BPE with byte fallback, as Llama 2 has it."""
    vocabulary = {"<unk>": 0, **{f"<0x{byte:02X}>": byte + 1 for byte in range(256)}}
    merges = []
    for word in ("▁" * 8, "▁the"):
        for char in word:
            vocabulary.setdefault(char, len(vocabulary))
        for end in range(2, len(word) + 1):
            if word[:end] not in vocabulary:
                merges.append((word[: end - 1], word[end - 1]))
                vocabulary[word[:end]] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return tokenizer


SOUND = {
    "byte level": byte_level(),
    "NFC": byte_level(normalizers.NFC()),
    "NFKC": byte_level(normalizers.NFKC()),
    "NFD": byte_level(normalizers.NFD()),
    "lower case": byte_level(normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])),
    "sentencepiece": sentencepiece(),
}
PIECES = [
    "the", " the", " " * 16, "\n", "ing", "\u0301", "e\u0301", "\u1fbe\u0308\u0301", "\u212b", "\u212a", "\U0001d40a",
    "▁" * 8, "<|end of the text|>", "한", "\u1112\u1161\u11ab", "🦊", "\u0130",
]  # fmt: skip


@pytest.mark.parametrize("kind", SOUND)
@given(pieces=st.lists(st.sampled_from(PIECES) | st.text(), max_size=20), repeats=st.integers(1, 30))
def test_no_text_has_fewer_tokens(kind: str, pieces: list[str], repeats: int) -> None:
    tokenizer, text = SOUND[kind], "".join(pieces) * repeats
    fewest = FewestTokens(tokenizer)
    assert fewest.is_sound
    assert fewest(text) <= len(tokenizer.encode(text, add_special_tokens=False).ids)


def test_the_bound_of_words_is_not_that_of_the_longest_token() -> None:
    fewest = FewestTokens(byte_level())
    assert fewest("x" * 1000) >= 50  # of the 19 bytes of the added token
    assert fewest("zzzz" * 1000) >= 3999  # no longer token has a z
    assert fewest(" " * 1600) <= 100


@pytest.mark.parametrize("form", ["NFC", "NFKC", "NFD", "NFKD"])
def test_normalization_shortens_no_text_to_less_than_a_quarter(form: Form) -> None:
    """Of each character that may result, the longest text with the same decomposition is at most 4 times as long."""
    decomposed: Form = "NFKD" if form in ("NFKC", "NFKD") else "NFD"
    characters = [char for char in map(chr, range(sys.maxunicode + 1)) if unicodedata.category(char)[0] != "C"]
    weight: dict[str, float] = {}  # the most bytes that may stand for each character of a decomposition
    for char in characters:
        parts = unicodedata.normalize(decomposed, char)
        for part in parts:
            weight[part] = max(weight.get(part, 0), len(part.encode()), len(char.encode()) / len(parts))
    for char in characters:
        if unicodedata.normalize(form, char) == char:
            longest = math.fsum(weight[part] for part in unicodedata.normalize(decomposed, char))
            assert longest <= 4 * len(char.encode()), char


def test_tokenizers_that_drop_or_join_text_have_no_bound() -> None:
    words = Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    incomplete = Tokenizer(models.BPE({"a": 0}, []))
    stripped = byte_level(normalizers.Strip())
    collapsed = byte_level(normalizers.Replace(Regex(" +"), " "))
    removing = byte_level()
    removing.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel(use_regex=False)]
    )
    greedy = byte_level()
    greedy.add_special_tokens([AddedToken("<mask>", lstrip=True)])
    for tokenizer in (words, incomplete, stripped, collapsed, removing, greedy):
        fewest = FewestTokens(tokenizer)
        assert not fewest.is_sound
        assert fewest("a" * 100_000) == 0


def test_the_demo_model_has_a_bound(demo_model: Path) -> None:
    fewest = FewestTokens(Tokenizer.from_file(str(demo_model / "tokenizer.json")))
    assert 100_000 > fewest("tale " * 100_000) > 30_000
