"""What a piece of a model's answer turns out to be."""

from __future__ import annotations

import msgspec


class ContentDelta(msgspec.Struct, frozen=True, tag="content"):
    """More of what the assistant says to the user."""

    text: str


class ReasoningDelta(msgspec.Struct, frozen=True, tag="reasoning"):
    """More of what the model thinks before it answers."""

    text: str


class ToolCallStart(msgspec.Struct, frozen=True, tag="tool_call"):
    """The assistant calls the function `name`; it is call `index` of the message, from 0."""

    index: int
    id: str
    name: str


class ToolCallArguments(msgspec.Struct, frozen=True, tag="tool_call_arguments"):
    """More of the JSON text of the arguments of call `index`, as the model writes it."""

    index: int
    delta: str


Event = ContentDelta | ReasoningDelta | ToolCallStart | ToolCallArguments


def merged(events: list[Event]) -> list[Event]:
    """`events` with neighbours of one kind made one, so that a piece of text costs one message to a client."""
    result: list[Event] = []
    for event in events:
        joined = _join(result[-1], event) if result else None
        if joined is None:
            result.append(event)
        else:
            result[-1] = joined
    return result


def _join(first: Event, second: Event) -> Event | None:
    if isinstance(first, ContentDelta) and isinstance(second, ContentDelta):
        return ContentDelta(first.text + second.text)
    if isinstance(first, ReasoningDelta) and isinstance(second, ReasoningDelta):
        return ReasoningDelta(first.text + second.text)
    if isinstance(first, ToolCallArguments) and isinstance(second, ToolCallArguments) and first.index == second.index:
        return ToolCallArguments(first.index, first.delta + second.delta)
    return None
