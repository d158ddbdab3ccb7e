"""Log probabilities in OpenAI's two shapes: for completions and for chats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from quire.frontend.http.transport.responses import encoded
from quire.frontend.outputs import Logprob, PositionLogprobs
from quire.frontend.text.offsets import TextOffsets
from quire.frontend.text.tokenizer import Tokenizer
from quire.frontend.turns import in_turns


class CompletionLogprobs(msgspec.Struct):
    """Log probabilities of a completion, one list entry per token.

    `text_offset`: the characters of the text before the token.
    """

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]

    def __add__(self, other: CompletionLogprobs) -> CompletionLogprobs:
        pairs = zip(msgspec.structs.astuple(self), msgspec.structs.astuple(other), strict=True)
        return CompletionLogprobs(*(first + second for first, second in pairs))


class TopLogprob(msgspec.Struct):
    """One of the likeliest tokens at a position."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(msgspec.Struct):
    """The token at a position, and the likeliest ones."""

    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    """Log probabilities of a message."""

    content: list[TokenLogprob]
    refusal: None = None


class TokenWriter:
    """Writes tokens as text, or as the unambiguous `token_id:N`."""

    def __init__(self, tokenizer: Tokenizer | None, as_ids: bool) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids or tokenizer is None

    def text(self, token_id: int) -> str:
        """Return the token as text."""
        if self._as_ids or self._tokenizer is None:
            return f"token_id:{token_id}"
        return self._tokenizer.token_text(token_id)

    def bytes(self, token_id: int) -> list[int] | None:
        """Return the token's UTF-8 bytes, which may be part of a character; None if they are unknown."""
        piece = None if self._tokenizer is None else self._tokenizer.token_bytes(token_id)
        return None if piece is None else list(piece)

    async def completion(
        self, positions: Sequence[PositionLogprobs | None], token_ids: Sequence[int], top: int, offsets: TextOffsets
    ) -> CompletionLogprobs:
        """Return the log probabilities of `token_ids`, the next ones of a text with these `offsets`."""
        result = CompletionLogprobs([], [], [], [])
        async for token_id, position in in_turns(zip(token_ids, positions, strict=True)):
            result.text_offset.append(offsets.place(token_id))
            result.tokens.append(self.text(token_id))
            result.token_logprobs.append(None if position is None else position[token_id].logprob)
            result.top_logprobs.append(None if position is None else encoded(self._top(position, token_id, top)))
        return result

    async def chat(self, positions: Sequence[PositionLogprobs], token_ids: Sequence[int], top: int) -> ChatLogprobs:
        """Return the log probabilities of `token_ids`, with the `top` likeliest tokens at each position."""
        pairs = in_turns(zip(token_ids, positions, strict=True))
        return ChatLogprobs([self.token(token_id, position, top) async for token_id, position in pairs])

    def token(self, token_id: int, position: PositionLogprobs, top: int) -> TokenLogprob:
        """Return the log probabilities at one position in a chat."""
        likeliest = [
            TopLogprob(self.text(other), each.logprob, self.bytes(other)) for other, each in ranked(position, top)
        ]
        own = position[token_id].logprob
        return encoded(TokenLogprob(self.text(token_id), own, self.bytes(token_id), likeliest))

    def _top(self, position: PositionLogprobs, sampled: int, top: int) -> dict[str, float]:
        """Return the likeliest tokens, followed by the sampled one if it is not among them, as OpenAI does."""
        likeliest = {**dict(ranked(position, top)), sampled: position[sampled]}
        return {self.text(token_id): entry.logprob for token_id, entry in likeliest.items()}


def ranked(position: PositionLogprobs, top: int) -> list[tuple[int, Logprob]]:
    """Return the `top` likeliest tokens of a position, likeliest first."""
    return sorted(((token, entry) for token, entry in position.items() if entry.rank <= top), key=lambda e: e[1].rank)


async def prompt_logprobs(positions: Sequence[PositionLogprobs | None] | None) -> list[Any] | None:
    """Return a prompt's log probabilities in vLLM's shape: a dict by token id per position, None for the first."""
    if positions is None:
        return None
    return [
        None if position is None else encoded({str(token): entry for token, entry in position.items()})
        async for position in in_turns(positions)
    ]
