"""The bytes of tokens, derived from a tokenizer's decoder."""

from __future__ import annotations

import codecs
import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
BYTEWISE = "quire.bytewise"


def _replace_bytewise(error: UnicodeError) -> tuple[str, int]:
    """Replace every invalid byte by one U+FFFD, as sentencepiece does."""
    if not isinstance(error, UnicodeDecodeError):
        raise error
    return "\ufffd" * (error.end - error.start), error.end


codecs.register_error(BYTEWISE, _replace_bytewise)


@functools.cache
def byte_of_char() -> dict[str, int]:
    """Return GPT-2's alphabet: the 256 printable characters that represent bytes in byte-level BPE."""
    kept = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    moved = [byte for byte in range(256) if byte not in kept]
    table = {chr(byte): byte for byte in kept}
    table.update({chr(256 + index): byte for index, byte in enumerate(moved)})
    return table


@dataclass(frozen=True)
class ByteRule:
    """The rule by which tokens become bytes, and bytes become text.

    Either byte-level BPE (GPT-2, Llama 3, Qwen), or sentencepiece (Llama 2, Mistral, Gemma): `replacements`, then
    `<0xE2>` as the byte it names. `strip_left` spaces are dropped at the start of a text. `utf8_errors` is the
    codec error handler that inserts U+FFFD as the tokenizer's own decoder does.
    """

    byte_level: bool
    byte_fallback: bool = False
    replacements: tuple[tuple[str, str], ...] = ()
    strip_left: int = 0

    @property
    def utf8_errors(self) -> str:
        """Name of the error handler for `bytes.decode`."""
        return "replace" if self.byte_level else BYTEWISE

    def to_bytes(self, token: str) -> bytes:
        """Return the bytes of `token`, given as the vocabulary writes it."""
        if self.byte_level:
            alphabet = byte_of_char()
            try:
                return bytes([alphabet[char] for char in token])
            except KeyError:  # an added token with characters outside the alphabet is plain text
                return token.encode()
        for old, new in self.replacements:
            token = token.replace(old, new)
        if self.byte_fallback and (match := BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        return token.encode()


def byte_rule(decoder: Mapping[str, Any] | None) -> ByteRule | None:
    """Return the rule of a `decoder` from tokenizer.json, or None if tokens have no bytes of their own."""
    if decoder is None:
        return None
    steps: list[Mapping[str, Any]] = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = [step["type"] for step in steps]
    if kinds and kinds[0] == "ByteLevel" and set(kinds[1:]) <= {"Fuse"}:
        return ByteRule(byte_level=True)
    return _sentencepiece_rule(steps, kinds)


def _sentencepiece_rule(steps: list[Mapping[str, Any]], kinds: list[str]) -> ByteRule | None:
    num_replacements = len(kinds) - len([kind for kind in kinds if kind != "Replace"])
    rest = kinds[num_replacements:]
    if rest not in (["ByteFallback", "Fuse"], ["ByteFallback", "Fuse", "Strip"], ["Fuse"], ["Fuse", "Strip"]):
        return None
    replacements = []
    for step in steps[:num_replacements]:
        if step["type"] != "Replace" or "String" not in step["pattern"]:
            return None
        replacements.append((step["pattern"]["String"], step["content"]))
    strip: Mapping[str, Any] = steps[-1] if rest[-1] == "Strip" else {"content": " ", "start": 0, "stop": 0}
    if strip["content"] != " " or strip["stop"] != 0:
        return None
    return ByteRule(
        byte_level=False,
        byte_fallback="ByteFallback" in rest,
        replacements=tuple(replacements),
        strip_left=strip["start"],
    )
