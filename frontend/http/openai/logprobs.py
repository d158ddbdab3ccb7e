"""Log probabilities in the two shapes that OpenAI has for them: of completions, and of chats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from quire.frontend.outputs import Logprob, PositionLogprobs
from quire.frontend.text.tokenizer import Tokenizer


class CompletionLogprobs(msgspec.Struct):
    """Of a completion, a list entry a token; `text_offset` counts characters from the beginning of the text."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class TopLogprob(msgspec.Struct):
    """One token that could have stood there."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(msgspec.Struct):
    """The token that stands there, and the likeliest ones."""

    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    """Of a message."""

    content: list[TokenLogprob]
    refusal: None = None


class TokenWriter:
    """Writes tokens as text, or as `token_id:N`, which is the same for no two tokens."""

    def __init__(self, tokenizer: Tokenizer | None, as_ids: bool) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids or tokenizer is None

    def text(self, token_id: int) -> str:
        """The token in words."""
        if self._as_ids or self._tokenizer is None:
            return f"token_id:{token_id}"
        return self._tokenizer.token_text(token_id)

    def bytes(self, token_id: int) -> list[int] | None:
        """Its UTF-8 bytes, which may be a part of a character; None where they cannot be known."""
        piece = None if self._tokenizer is None else self._tokenizer.token_bytes(token_id)
        return None if piece is None else list(piece)

    def completion(
        self, positions: Sequence[PositionLogprobs | None], token_ids: Sequence[int], top: int, offset: int
    ) -> CompletionLogprobs:
        """The log probabilities of `token_ids`, whose text begins at character `offset`; None for the first token."""
        result = CompletionLogprobs([], [], [], [])
        for token_id, position in zip(token_ids, positions, strict=True):
            text = self.text(token_id)
            result.text_offset.append(offset)
            result.tokens.append(text)
            result.token_logprobs.append(None if position is None else position[token_id].logprob)
            result.top_logprobs.append(None if position is None else self._top(position, token_id, top))
            offset += len(text)
        return result

    def chat(self, positions: Sequence[PositionLogprobs], token_ids: Sequence[int], top: int) -> ChatLogprobs:
        """The log probabilities of `token_ids`, with the `top` likeliest of each position."""
        content = []
        for token_id, position in zip(token_ids, positions, strict=True):
            likeliest = [
                TopLogprob(self.text(other), entry.logprob, self.bytes(other)) for other, entry in ranked(position, top)
            ]
            entry = position[token_id]
            content.append(TokenLogprob(self.text(token_id), entry.logprob, self.bytes(token_id), likeliest))
        return ChatLogprobs(content)

    def _top(self, position: PositionLogprobs, drawn: int, top: int) -> dict[str, float]:
        """The likeliest, and after them the one that was drawn if it is none of them, as OpenAI has it."""
        likeliest = {**dict(ranked(position, top)), drawn: position[drawn]}
        return {self.text(token_id): entry.logprob for token_id, entry in likeliest.items()}


def ranked(position: PositionLogprobs, top: int) -> list[tuple[int, Logprob]]:
    """The `top` likeliest of a position, best first."""
    return sorted(((token, entry) for token, entry in position.items() if entry.rank <= top), key=lambda e: e[1].rank)


def prompt_logprobs(positions: Sequence[PositionLogprobs | None] | None) -> list[Any] | None:
    """vLLM's shape of the log probabilities of a prompt: a dict by token id for each position, None for the first."""
    if positions is None:
        return None
    return [
        None if position is None else {str(token): entry for token, entry in position.items()} for position in positions
    ]
