"""Bad words: texts that an answer must not contain, in the form that the engine reads."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

import msgspec

from quire.frontend.text.tokenizer import Tokenizer
from quire.protocol.messages import SAMPLING_LENGTHS, SamplingParams, StructuredOutputs

__all__ = ["without_bad_words"]


def without_bad_words(params: SamplingParams, tokenizer: Tokenizer | None) -> SamplingParams:
    """Return `params` with token ids or a grammar in place of `bad_words`.

    A grammar keeps them out whatever tokens write them. Only one grammar can constrain an answer: beside
    `structured_outputs` the usual tokens of each word are banned. Raises `ValueError` without a tokenizer or its
    tokenizer.json, which grammars need, and for a word that has no tokens to ban.
    """
    if not params.bad_words:
        return msgspec.structs.replace(params, bad_words=None)
    if tokenizer is None:
        raise ValueError(f"bad_words={params.bad_words!r} needs a tokenizer; use bad_words_token_ids")
    if params.structured_outputs is None:
        if not (file := tokenizer.path / "tokenizer.json").is_file():
            raise ValueError(f"bad_words={params.bad_words!r} need {file}, and there is none; use bad_words_token_ids")
        shown = [] if params.skip_special_tokens else _separators(params.bad_words, tokenizer)
        grammar = _grammar(params.bad_words, shown)
        return msgspec.structs.replace(params, bad_words=None, structured_outputs=StructuredOutputs(grammar=grammar))
    banned = [*(params.bad_words_token_ids or ()), *_token_ids(params.bad_words, tokenizer)]
    SAMPLING_LENGTHS["bad_words_token_ids"].check("bad_words, as token ids,", banned)
    return msgspec.structs.replace(params, bad_words=None, bad_words_token_ids=banned)


def _grammar(words: Sequence[str], special_token_ids: Iterable[int]) -> str:
    """Return the Lark grammar of all texts without the words, with some special tokens anywhere.

    A text between two special tokens is one lexeme, so that a word cannot hide where two lexemes meet. Others than
    `special_token_ids` are not sampled. A word that begins with a space is also kept out of the beginning of a text,
    where tokenizers write none.
    """
    contains = f"(?s:.*)({_any_of(words)})(?s:.*)"
    if first := [word.lstrip() for word in words if word[0].isspace()]:
        contains += f"|({_any_of(first)})(?s:.*)"
    special = _ranges(special_token_ids)
    start = f"TEXT? (<[{special}]>+ TEXT?)*" if special else "TEXT?"
    return f"start: {start}\nTEXT: /(?s:.)+/ & ~/{contains}/\n"


def _separators(words: Sequence[str], tokenizer: Tokenizer) -> list[int]:
    """Return the special tokens whose text is no part of a word, nor has one, also with what stands beside it.

    Those that the text does not show could stand within a word, so none of them is one.
    """
    texts = {token_id: tokenizer.added_tokens[token_id] for token_id in tokenizer.special_token_ids}
    ends = {text[side] for text in texts.values() if text for side in (0, -1)}
    crossing = [word for word in words if not ends.isdisjoint(word)]
    return [
        token_id
        for token_id, text in texts.items()
        if not any(word in text for word in words) and not any(_may_cross(word, text) for word in crossing)
    ]


def _may_cross(word: str, text: str) -> bool:
    """Return whether a word may begin or end within a text, with the rest of it beside that."""
    sizes = range(1, min(len(word), len(text)) + 1)
    return text in word or any(word.endswith(text[:size]) or word.startswith(text[-size:]) for size in sizes)


def _any_of(words: Iterable[str]) -> str:
    """Return a regular expression of the words, with an escape for each character that may mean something."""
    return "|".join(
        "".join(each if each.isascii() and each.isalnum() else f"\\x{{{ord(each):x}}}" for each in word)
        for word in dict.fromkeys(words)
    )


def _ranges(ids: Iterable[int]) -> str:
    """Return ids as llguidance writes a set of them: `1-3,7-7`."""
    ordered = sorted(ids)
    if not ordered:
        return ""
    gaps = [(last, first) for last, first in pairwise(ordered) if first != last + 1]
    firsts = [ordered[0], *(first for _, first in gaps)]
    lasts = [*(last for last, _ in gaps), ordered[-1]]
    return ",".join(f"{first}-{last}" for first, last in zip(firsts, lasts, strict=True))


def _token_ids(words: Sequence[str], tokenizer: Tokenizer) -> list[list[int]]:
    """Return the tokens of each word at the start of a text and after a space."""
    stripped = [word.lstrip() for word in words]
    plains = tokenizer.encode_batch(stripped, add_special_tokens=False)
    spaceds = tokenizer.encode_batch([f" {word}" for word in stripped], add_special_tokens=False)
    banned: list[list[int]] = []
    for word, plain, spaced in zip(words, plains, spaceds, strict=True):
        if not plain:
            raise ValueError(f"bad_words={words!r}: the tokenizer has no tokens for {word!r}; leave it out")
        banned += [plain] if spaced == plain else [plain, spaced]
    return banned
