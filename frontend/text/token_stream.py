"""Token streams: they turn token ids into text one by one; the pieces concatenate to the whole text."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from itertools import islice
from typing import Protocol

from quire.frontend.text.token_bytes import ByteRule
from quire.frontend.text.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"
LONGEST_CHARACTER = 4  # bytes of UTF-8
MAX_UNDECIDED = 8  # tokens without text, or ending in U+FFFD, after which their text is accepted as it is


class TokenStream(Protocol):
    """A text that grows token by token."""

    def push(self, token_id: int) -> str:
        """Take one token; return the characters that are certain now."""

    def finish(self) -> str:
        """Return the rest: U+FFFD for a character that was never completed."""


class ByteStream:
    """A text of tokens with known bytes, through an incremental UTF-8 decoder; a token costs its length.

    A character that begins in the prompt's last tokens belongs to the output that completes it. Leading spaces are
    stripped only at the start of the whole text, so only if the prompt has no text.
    """

    def __init__(self, tokenizer: Tokenizer, rule: ByteRule, prompt: Sequence[int], skip_special: bool) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._skipped = tokenizer.special_token_ids if skip_special else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors=rule.utf8_errors)
        self._strip = rule.strip_left
        if self._strip:
            self._strip_within(prompt)
        self._utf8.decode(self._tail(prompt))

    def _piece(self, token_id: int) -> bytes:
        return b"" if token_id in self._skipped else self._token_bytes(token_id) or b""

    def _strip_within(self, prompt: Sequence[int]) -> None:
        for token_id in prompt:
            for byte in self._piece(token_id):
                self._strip = self._strip - 1 if byte == ord(" ") else 0
                if not self._strip:
                    return

    def _tail(self, prompt: Sequence[int]) -> bytes:
        """Return the bytes of the prompt's last character."""
        tail = b""
        for token_id in reversed(prompt):
            tail = self._piece(token_id) + tail
            if len(tail) >= LONGEST_CHARACTER:
                break
        begins = [index for index, byte in enumerate(tail) if byte & 0xC0 != 0x80]
        return tail[begins[-1] :] if begins else b""

    def push(self, token_id: int) -> str:
        """Take one token; return the characters that are certain now."""
        return self._stripped(self._utf8.decode(self._piece(token_id)))

    def finish(self) -> str:
        """Return the rest."""
        return self._stripped(self._utf8.decode(b"", final=True))

    def _stripped(self, text: str) -> str:
        if not self._strip or not text:
            return text
        spaces = min(len(text) - len(text.lstrip(" ")), self._strip)
        self._strip = self._strip - spaces if spaces == len(text) else 0
        return text[spaces:]


class WindowStream:
    """A text of tokens without known bytes: it decodes a short window of the last tokens, with and without the new one.

    `spaces_between=False` removes the spaces that a decoder puts between consecutive added tokens.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], skip_special: bool, spaces_between: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._added = {} if spaces_between or skip_special else tokenizer.added_tokens
        self._window = list(islice(filter(self._has_text, reversed(prompt)), MAX_UNDECIDED))[::-1]
        self._num_decided = len(self._window)

    def _has_text(self, token_id: int) -> bool:
        if self._skip_special and token_id in self._tokenizer.special_token_ids:
            return False
        return self._tokenizer.backend.id_to_token(token_id) is not None

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, self._skip_special)

    def push(self, token_id: int) -> str:
        """Take one token; return the characters that are certain now."""
        if not self._has_text(token_id):
            return ""
        follows_added = bool(self._window) and self._window[-1] in self._added
        self._window.append(token_id)
        new = self._new_text()
        undecided = len(self._window) - self._num_decided
        if (not new or new.endswith(REPLACEMENT)) and undecided < MAX_UNDECIDED:
            return ""
        self._decide()
        return self._added[token_id] if follows_added and token_id in self._added else new

    def finish(self) -> str:
        """Return the rest."""
        new = self._new_text()
        self._decide()
        return new

    def _new_text(self) -> str:
        """Return the text of the undecided tokens, in the context of the decided ones."""
        decided = self._decode(self._window[: self._num_decided])
        return self._decode(self._window)[len(decided) :]

    def _decide(self) -> None:
        """Accept the undecided tokens, and keep only them as context."""
        if self._num_decided < len(self._window):
            del self._window[: self._num_decided]
            self._num_decided = len(self._window)


def open_stream(
    tokenizer: Tokenizer,
    prompt_token_ids: Sequence[int] = (),
    *,
    skip_special_tokens: bool = True,
    spaces_between_special_tokens: bool = True,
) -> TokenStream:
    """Start the text that follows `prompt_token_ids`; its cost does not depend on the prompt's length."""
    if tokenizer.byte_rule is not None:
        return ByteStream(tokenizer, tokenizer.byte_rule, prompt_token_ids, skip_special_tokens)
    return WindowStream(tokenizer, prompt_token_ids, skip_special_tokens, spaces_between_special_tokens)
