"""Histories that exceed the context lose their oldest turns."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.frontend.text.chat.history import may_fit, room_for_answer, without_oldest_turns

ROLES = ["system", "developer", "user", "assistant", "tool"]
CONVERSATIONS = st.lists(
    st.builds(lambda role, size: {"role": role, "content": "x" * size}, st.sampled_from(ROLES), st.integers(0, 40)),
    min_size=1,
    max_size=24,
)


def length(messages: list[dict[str, Any]]) -> int:
    """Return the length of a prompt whose tokens are characters, with one before each message."""
    return sum(1 + len(each["content"]) for each in messages)


def fitted(messages: list[dict[str, Any]], most: int) -> tuple[list[dict[str, Any]], int]:
    """Return what is kept of a conversation, and how often the length of a prompt was asked for."""
    calls = 0

    async def num_tokens(messages: list[dict[str, Any]]) -> int:
        nonlocal calls
        calls += 1
        return length(messages)

    return asyncio.run(without_oldest_turns(messages, num_tokens, most)), calls


@given(CONVERSATIONS, st.integers(1, 300))
def test_no_more_turns_are_left_out_than_need_be(messages: list[dict[str, Any]], most: int) -> None:
    roles = [each["role"] for each in messages]
    users = [index for index, role in enumerate(roles) if role == "user"]
    asked = max(users, default=len(roles))
    rounds = [at for at in range(asked + 1, len(roles)) if roles[at] == "assistant" and roles[at - 1] != "assistant"]
    candidates = [
        [
            each
            for index, each in enumerate(messages)
            if index >= start or index == asked or each["role"] in ("system", "developer")
        ]
        for start in [*users, *rounds] or [0]
    ]
    kept, calls = fitted(messages, most)
    assert kept == next((each for each in candidates if length(each) <= most), candidates[-1])
    assert calls <= len(candidates).bit_length()


def test_a_long_loop_of_calls_loses_its_oldest_rounds_whole() -> None:
    asked = {"role": "user", "content": "What is the weather?"}
    system = {"role": "system", "content": "Be brief."}
    calls: list[dict[str, Any]] = [
        {"role": "assistant", "content": "", "tool_calls": [{"id": str(number)}]} for number in range(9)
    ]
    results: list[dict[str, Any]] = [
        {"role": "tool", "tool_call_id": str(number), "content": "x" * 20} for number in range(9)
    ]
    rounds = [[call, result, result] for call, result in zip(calls, results, strict=True)]
    flat = [each for one in rounds for each in one]
    kept, _ = fitted([system, {"role": "user", "content": "Hi"}, asked, *flat], 160)
    assert kept == [system, asked, *flat[-9:]]
    assert length(kept) <= 160 < length(kept) + length(rounds[0])
    assert fitted([system, asked, *flat], 10)[0] == [system, asked, *flat[-3:]]


def test_texts_that_cannot_fit_are_not_tokenized() -> None:
    long = {"role": "user", "content": "x" * 1000}
    assert not may_fit([long], 62)
    assert may_fit([long], 63)
    assert fitted([long, long, long], 10) == ([long], 0)


@pytest.mark.parametrize(
    ("max_tokens", "context", "room"), [(None, 8192, 512), (None, 1024, 256), (100, 1024, 100), (4000, 8192, 2048)]
)
def test_an_answer_gets_room(max_tokens: int | None, context: int, room: int) -> None:
    assert room_for_answer(max_tokens, context) == room
