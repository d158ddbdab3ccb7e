"""The message of an answer, and the events of a streamed one."""

from __future__ import annotations

from typing import Any

import msgspec


class TextBlock(msgspec.Struct, tag_field="type", tag="text"):
    """Text of the assistant."""

    text: str = ""


class ThinkingBlock(msgspec.Struct, tag_field="type", tag="thinking"):
    """Thoughts of the model. `signature` is empty: nothing verifies it."""

    thinking: str = ""
    signature: str = ""


class ToolUseBlock(msgspec.Struct, tag_field="type", tag="tool_use"):
    """A tool call that the client should make."""

    id: str
    name: str
    input: dict[str, Any] = {}


Block = TextBlock | ThinkingBlock | ToolUseBlock


class MessageUsage(msgspec.Struct):
    """Token counts; `input_tokens` excludes those that were found in the prefix cache."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int = 0


class Message(msgspec.Struct, tag_field="type", tag="message", kw_only=True):
    """The assistant's message. `stop_reason` is None until it ends."""

    id: str
    role: str = "assistant"
    model: str
    content: list[Block] = []
    stop_reason: str | None = None
    stop_sequence: str | None = None
    usage: MessageUsage


class MessageStreamEvent(msgspec.Struct, tag_field="type"):
    """One event of a stream."""

    @property
    def name(self) -> str:
        """The event's type."""
        return str(self.__struct_config__.tag)


class MessageStart(MessageStreamEvent, tag="message_start"):
    """The message begins, without content."""

    message: Message


class PingEvent(MessageStreamEvent, tag="ping"):
    """The connection is alive."""


class BlockStart(MessageStreamEvent, tag="content_block_start"):
    """An empty block begins."""

    index: int
    content_block: Block


class TextDelta(msgspec.Struct, tag_field="type", tag="text_delta"):
    """A piece of text."""

    text: str


class ThinkingDelta(msgspec.Struct, tag_field="type", tag="thinking_delta"):
    """A piece of thoughts."""

    thinking: str


class InputJsonDelta(msgspec.Struct, tag_field="type", tag="input_json_delta"):
    """A piece of the JSON text of a call's input."""

    partial_json: str


class BlockDelta(MessageStreamEvent, tag="content_block_delta"):
    """A block grows."""

    index: int
    delta: TextDelta | ThinkingDelta | InputJsonDelta


class BlockStop(MessageStreamEvent, tag="content_block_stop"):
    """A block has ended."""

    index: int


class Stop(msgspec.Struct):
    """The reason why the message ended."""

    stop_reason: str | None
    stop_sequence: str | None


class MessageDelta(MessageStreamEvent, tag="message_delta"):
    """The fields of the message that are known at its end."""

    delta: Stop
    usage: MessageUsage


class MessageStop(MessageStreamEvent, tag="message_stop"):
    """The message has ended."""


class TokenCount(msgspec.Struct):
    """The number of tokens of a prompt."""

    input_tokens: int


EVENTS = (MessageStart, PingEvent, BlockStart, BlockDelta, BlockStop, MessageDelta, MessageStop)
