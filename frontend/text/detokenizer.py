"""The incremental detokenizer: text of a request while its tokens arrive, cut at the first stop string."""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol, Self

from quire.frontend.text.token_bytes import ByteRule
from quire.frontend.text.tokenizer import Tokenizer


@dataclass(slots=True)
class _Node:
    """A prefix of stop strings, of `length` characters; `fallback` is its longest suffix that is also a prefix."""

    length: int = 0
    stop: str | None = None
    fallback: _Node | None = None
    children: dict[str, _Node] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Hit:
    """A stop string that was found; it ends after `end` characters of the scanned piece."""

    stop: str
    end: int


class StopStrings:
    """An Aho-Corasick automaton: constant time per character for any number of stop strings.

    Making it takes some ten microseconds for each character, so the completions of a request share one.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self.root = _Node()
        for stop in stops:
            if not stop:
                raise ValueError("a stop string is empty; leave it out")
            self._add(stop)
        self._link()

    def _add(self, stop: str) -> None:
        node = self.root
        for char in stop:
            node = node.children.setdefault(char, _Node(length=node.length + 1))
        node.stop = stop

    def _link(self) -> None:
        """Set fallbacks in order of length; a node takes over the stop string that ends in its fallback."""
        queue = deque([self.root])
        while queue:
            node = queue.popleft()
            for char, child in node.children.items():
                child.fallback = self.root if node is self.root else self.next(node.fallback or self.root, char)
                child.stop = child.stop or child.fallback.stop
                queue.append(child)

    @staticmethod
    def next(node: _Node, char: str) -> _Node:
        """Return the node after `char`: the longest prefix of a stop string that the text now ends with."""
        while char not in node.children:
            if node.fallback is None:
                return node
            node = node.fallback
        return node.children[char]


class StopScanner:
    """A scan of one text for stop strings.

    The hit that ends first wins; of several that end at the same character, the longest. So the place of the cut
    depends only on the text, not on the pieces in which it arrives.
    """

    def __init__(self, stops: StopStrings) -> None:
        self._next = stops.next
        self._state = stops.root

    @property
    def num_held(self) -> int:
        """Number of characters at the end of the text that may begin a stop string."""
        return self._state.length

    def scan(self, piece: str, ignore_hits: bool = False) -> Hit | None:
        """Scan the next piece of the text up to the first hit; `ignore_hits` skips hits that end in the piece."""
        for index, char in enumerate(piece):
            node = self._next(self._state, char)
            if node.stop is not None and not ignore_hits:
                self._state = node
                return Hit(node.stop, index + 1)
            while not node.children and node.fallback is not None:  # complete and ignored: no longer a prefix
                node = node.fallback
            self._state = node
        return None


REPLACEMENT = "\ufffd"
LONGEST_CHARACTER = 4  # bytes of UTF-8
MAX_UNDECIDED = 8  # tokens without text, or ending in U+FFFD, after which their text is accepted as it is


class TokenStream(Protocol):
    """A text that grows token by token."""

    def push(self, token_id: int) -> str:
        """Take one token; return the characters that are certain now."""

    def finish(self) -> str:
        """Return the rest: U+FFFD for a character that was never completed."""

    def copy(self) -> Self:
        """Return a text that goes on from here by itself."""


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

    def copy(self) -> Self:
        """Return a text that goes on from here by itself."""
        other, utf8 = copy(self), type(self._utf8)(errors=self._utf8.errors)
        utf8.setstate(self._utf8.getstate())
        other._utf8 = utf8  # noqa: SLF001 - of this class
        return other

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

    def copy(self) -> Self:
        """Return a text that goes on from here by itself."""
        other = copy(self)
        other._window = list(self._window)  # noqa: SLF001 - of this class
        return other

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


class IncrementalDetokenizer:
    """The text that follows a prompt, in whole characters; each token costs time proportional to its own length.

    Text that may begin a stop string is held back until it is known not to. A stop string counts
    only if a token after the `min_tokens`-th completes it; the text ends before it, or after it with
    `include_stop_str_in_output`.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int] = (),
        stop: StopStrings | None = None,
        include_stop_str_in_output: bool = False,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
        min_tokens: int = 0,
    ) -> None:
        self._stream = open_stream(
            tokenizer,
            prompt_token_ids,
            skip_special_tokens=skip_special_tokens,
            spaces_between_special_tokens=spaces_between_special_tokens,
        )
        self._scanner = None if stop is None else StopScanner(stop)
        self._include_stop = include_stop_str_in_output
        self._min_tokens = min_tokens
        self._finished = False
        self._text = ""
        self._not_in_text: list[str] = []
        self._not_handed_out: list[str] = []
        self._held = ""
        self.num_tokens = 0
        self.stop_reason: str | None = None

    def copy(self) -> Self:
        """Return a detokenizer of another answer to the same prompt; none may have taken a token yet."""
        other = copy(self)
        other._detach()  # noqa: SLF001 - of this class
        return other

    @property
    def text(self) -> str:
        """The text so far that is certain."""
        if self._not_in_text:
            self._text += "".join(self._not_in_text)
            self._not_in_text.clear()
        return self._text

    def delta(self) -> str:
        """Return the text added since the last call."""
        new = "".join(self._not_handed_out)
        self._not_handed_out.clear()
        return new

    def update(self, new_token_ids: Sequence[int], stop_token: bool = False) -> str | None:
        """Take the next tokens; return the stop string that ends the text with them, or None.

        Tokens after a stop string are ignored. `num_tokens` counts all tokens up to the one that completes it.
        With `stop_token=True` the last token is a stop token: it is counted, but contributes no text
        (unless `include_stop_str_in_output`).
        """
        silent = len(new_token_ids) - 1 if stop_token and not self._include_stop else -1
        for index, token_id in enumerate(new_token_ids):
            if self._finished:
                break
            self.num_tokens += 1
            if index != silent:
                self._append(self._stream.push(token_id))
        return self.stop_reason

    def finish(self) -> str | None:
        """End the text: flush what was held back, with U+FFFD for an incomplete character.

        Returns the stop string that ended the text, or None.
        """
        if not self._finished:
            self._append(self._stream.finish())
            self._finished = True
            self._emit(self._held)
            self._held = ""
        return self.stop_reason

    def _detach(self) -> None:
        """Share nothing that changes with the one that this is a copy of."""
        self._stream = self._stream.copy()
        self._scanner = copy(self._scanner)
        self._not_in_text, self._not_handed_out = [], []

    def _append(self, piece: str) -> None:
        if self._scanner is None:
            self._emit(piece)
            return
        hit = self._scanner.scan(piece, ignore_hits=self.num_tokens <= self._min_tokens and self._min_tokens > 0)
        known = self._held + piece
        if hit is None:
            num_held = 0 if self._include_stop else self._scanner.num_held
            self._emit(known[: len(known) - num_held])
            self._held = known[len(known) - num_held :]
            return
        end = len(self._held) + hit.end
        self._emit(known[: end if self._include_stop else end - len(hit.stop)])
        self._held = ""
        self._finished = True
        self.stop_reason = hit.stop

    def _emit(self, text: str) -> None:
        if text:
            self._not_in_text.append(text)
            self._not_handed_out.append(text)
