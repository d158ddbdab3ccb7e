"""Events of a parsed answer: deltas of content and reasoning, tool calls and their arguments."""

from __future__ import annotations

import msgspec


class ContentDelta(msgspec.Struct, frozen=True, tag="content"):
    """A piece of the content."""

    text: str


class ReasoningDelta(msgspec.Struct, frozen=True, tag="reasoning"):
    """A piece of the model's thoughts."""

    text: str


class ToolCallStart(msgspec.Struct, frozen=True, tag="tool_call"):
    """The start of call `index` of the message, counted from 0, to the function `name`."""

    index: int
    id: str
    name: str


class ToolCallArguments(msgspec.Struct, frozen=True, tag="tool_call_arguments"):
    """A piece of the JSON text of the arguments of call `index`."""

    index: int
    delta: str


Event = ContentDelta | ReasoningDelta | ToolCallStart | ToolCallArguments


def merged(events: list[Event]) -> list[Event]:
    """Merge adjacent events of one kind, so that a piece of text costs one message to a client."""
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
