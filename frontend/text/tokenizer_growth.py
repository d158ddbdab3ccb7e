"""A bound of the factor by which the parts of a tokenizer can lengthen a text, from tokenizer.json alone."""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from quire.frontend.text.tokenizer_files import TokenizerError

_MOST_GROWTH = 64  # characters for each of a text; all published tokenizers stay below 4
_MOST_MAPPED_BYTES = 256  # for one entry of a map of characters; Unicode's own compatibility forms take up to 33
_MOST_SPECIAL_TOKENS = 1024  # around a text

_OPTIONAL = re.compile(r"[*?|^$]|\(\)|\{[0,]|\\[bBAzZGKyY]")  # without these, a pattern matches a character or more

Component = Mapping[str, Any]


class _TokenizerFile(msgspec.Struct):
    """The parts of tokenizer.json that change a text; its vocabulary is not read."""

    normalizer: dict[str, Any] | None = None
    decoder: dict[str, Any] | None = None
    post_processor: dict[str, Any] | None = None


def check_growth(folder: Path) -> None:
    """Raise TokenizerError if the tokenizer of a folder may make a short text very long."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        return
    try:
        file = msgspec.json.decode(path.read_bytes(), type=_TokenizerFile)
        growths = {
            "normalizer": math.prod(map(_growth, _leaves(file.normalizer, "normalizers"))),
            "decoder": math.prod(map(_growth, _leaves(file.decoder, "decoders"))),
        }
        num_special = sum(map(_num_special_tokens, _leaves(file.post_processor, "processors")))
    except (ValueError, OSError, RecursionError) as error:
        raise TokenizerError(f"{path} cannot be read: {error}; restore the file from the model's source") from error
    for name, growth in growths.items():
        if growth > _MOST_GROWTH:
            raise _refused(path, f"its {name} may make a text {growth} times as long", f"{_MOST_GROWTH} times")
    if num_special > _MOST_SPECIAL_TOKENS:
        raise _refused(path, f"it puts {num_special} special tokens around a text", str(_MOST_SPECIAL_TOKENS))


def _refused(path: Path, what: str, allowed: str) -> TokenizerError:
    return TokenizerError(f"{path}: {what}, and {allowed} are allowed; restore the file from the model's source")


def _leaves(part: Component | None, members: str) -> Iterator[Component]:
    """Yield the parts of a component that are no sequences. What is no component is left to the library to reject."""
    waiting: list[object] = [part]
    while waiting:
        each = waiting.pop()
        if isinstance(each, dict) and each.get("type") == "Sequence" and isinstance(each.get(members), list):
            waiting += each[members]
        elif isinstance(each, dict):
            yield each


def _growth(part: Component) -> int:
    """Return the characters that one character becomes at most, but for Unicode's own forms, which are bounded."""
    match part:
        case {"type": "Replace", "content": str(content), "pattern": {"String": str(text)}}:
            return max(1, len(content)) if text else 1 + len(content)
        case {"type": "Replace", "content": str(content), "pattern": {"Regex": str(pattern)}}:
            return 1 + len(content) if _may_insert(pattern) else max(1, len(content))
        case {"type": "Prepend", "prepend": str(text)}:
            return max(1, len(text))
        case {"type": "Precompiled", "precompiled_charsmap": str(encoded)}:
            longest = _longest_mapped(base64.b64decode(encoded))
            return 1 if longest <= _MOST_MAPPED_BYTES else longest
        case _:
            return 1


def _may_insert(pattern: str) -> bool:
    """Return True if a pattern may match no character, so that its replacement is inserted between two of them."""
    return not pattern or _OPTIONAL.search(pattern) is not None


def _longest_mapped(charsmap: bytes) -> int:
    """Return the bytes of the longest text in a map of characters: the size of its trie, the trie, then the texts."""
    size = int.from_bytes(charsmap[:4], "little")
    return max(map(len, charsmap[4 + size :].split(b"\0")))


def _num_special_tokens(part: Component) -> int:
    match part:
        case {"type": "TemplateProcessing", "single": list(single), "pair": list(pair), "special_tokens": dict(known)}:
            longest = max((len(token.get("ids", [])) for token in known.values()), default=0)
            return max(len(single), len(pair)) * max(1, longest)
        case _:
            return 0
