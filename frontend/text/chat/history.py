"""Conversations that exceed the context: their oldest turns are left out, as Ollama does it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

M = TypeVar("M", bound=Mapping[str, Any])

_INSTRUCTIONS = ("system", "developer")
_LONGEST_TOKEN = 16  # characters; a longer text is not tokenized to learn that it exceeds the context
_LEAST_ANSWER = 512  # tokens that are kept free for an answer of no given length,
_ANSWER_PART = 4  # or this part of the context


def room_for_answer(max_tokens: int | None, max_model_len: int) -> int:
    """Return the tokens of the context that a history should leave to its answer."""
    return min(max_tokens or _LEAST_ANSWER, max_model_len // _ANSWER_PART)


def may_fit(messages: Sequence[Mapping[str, Any]], most: int) -> bool:
    """Return False if the texts of a conversation are known to exceed `most` tokens."""
    texts = (content for each in messages if isinstance(content := each.get("content"), str))
    return sum(map(len, texts)) <= most * _LONGEST_TOKEN


async def without_oldest_turns(
    messages: Sequence[M], num_tokens: Callable[[list[M]], Awaitable[int]], most: int
) -> list[M]:
    """Return a conversation without as many of its oldest turns as exceed `most` tokens.

    A turn begins with a message of the user, so that no answer or result of a tool loses its question. If the last turn
    alone exceeds it, its oldest rounds are left out too: a round is an answer and the results of its calls.
    Instructions, the last message of the user and the last round stay, even if these exceed it. `num_tokens` returns
    the length of a conversation's prompt; it is called a number of times that is the logarithm of turns and rounds.
    """
    roles: list[str] = [each["role"] for each in messages]
    turns = [index for index, role in enumerate(roles) if role == "user"]
    if not turns:
        return list(messages)
    asked = turns[-1]
    starts = [*turns, *(index for index in range(asked + 2, len(messages)) if _begins_round(roles, index))]
    low, high = 0, len(starts) - 1
    while low < high:
        middle = (low + high) // 2
        kept = _from(messages, starts[middle], asked)
        if may_fit(kept, most) and await num_tokens(kept) <= most:
            high = middle
        else:
            low = middle + 1
    return _from(messages, starts[low], asked)


def _begins_round(roles: Sequence[str], index: int) -> bool:
    return roles[index] == "assistant" and roles[index - 1] != "assistant"


def _from(messages: Sequence[M], start: int, asked: int) -> list[M]:
    """Return the messages from an index on, with instructions and the user's last message from before it."""
    return [
        each for index, each in enumerate(messages) if index >= start or index == asked or each["role"] in _INSTRUCTIONS
    ]
