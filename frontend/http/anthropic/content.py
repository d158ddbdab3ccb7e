"""The content blocks of a message while the model writes them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from quire.frontend.http.anthropic.message import (
    Block,
    BlockDelta,
    BlockStart,
    BlockStop,
    InputJsonDelta,
    StreamEvent,
    Text,
    TextDelta,
    Thinking,
    ThinkingDelta,
    ToolUse,
)
from quire.frontend.text.chat.events import ContentDelta, Event, ReasoningDelta, ToolCallArguments, ToolCallStart

INVALID_JSON = "INVALID_JSON"


class Content:
    """`blocks` in the order in which they began; the last one is empty until it has ended.

    `shows_thinking`: whether the text of thoughts is told, and not only that there were some.
    """

    def __init__(self, shows_thinking: bool) -> None:
        self.blocks: list[Block] = []
        self._shows_thinking = shows_thinking
        self._written: list[str] | None = None  # of the last block, None when there is none or it has ended

    def take(self, events: list[Event]) -> Iterator[StreamEvent]:
        """Add what came of the answer."""
        for event in events:
            match event:
                case ContentDelta(text):
                    yield from self._grow(Text(), text, TextDelta(text))
                case ReasoningDelta(text):
                    shown = text if self._shows_thinking else ""
                    yield from self._grow(Thinking(), shown, ThinkingDelta(shown))
                case ToolCallStart(_, call_id, name):
                    yield from self._begin(ToolUse(call_id, name))
                case ToolCallArguments(_, text):
                    yield from self._grow(self.blocks[-1], text, InputJsonDelta(text))

    def end(self) -> Iterator[StreamEvent]:
        """End the last block."""
        if self._written is None:
            return
        text, self._written = "".join(self._written), None
        match self.blocks[-1]:
            case Text() as block:
                block.text = text
            case Thinking() as thoughts:
                thoughts.thinking = text
            case ToolUse() as call:
                call.input = _input(text)
        yield BlockStop(len(self.blocks) - 1)

    def _grow(self, block: Block, text: str, delta: Any) -> Iterator[StreamEvent]:
        """Add to the last block; to `block`, if the last one is of another kind."""
        if self._written is None or type(self.blocks[-1]) is not type(block):
            yield from self._begin(block)
        assert self._written is not None
        if text:
            self._written.append(text)
            yield BlockDelta(len(self.blocks) - 1, delta)

    def _begin(self, block: Block) -> Iterator[StreamEvent]:
        yield from self.end()
        self.blocks.append(block)
        self._written = []
        yield BlockStart(len(self.blocks) - 1, block)


def _input(text: str) -> dict[str, Any]:
    """The object that a call's arguments are; one that holds their text, if they are none or were cut off."""
    try:
        return msgspec.json.decode(text or "{}", type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        return {INVALID_JSON: text}
