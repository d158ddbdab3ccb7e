"""The message that answers, and the events of a streamed one."""

from __future__ import annotations

from typing import Any

import msgspec


class TextBlock(msgspec.Struct, tag_field="type", tag="text"):
    """What the assistant says."""

    text: str = ""


class ThinkingBlock(msgspec.Struct, tag_field="type", tag="thinking"):
    """What the model thinks. Nobody has to prove who thought it, so there is no signature."""

    thinking: str = ""
    signature: str = ""


class ToolUseBlock(msgspec.Struct, tag_field="type", tag="tool_use"):
    """A call that the client should make."""

    id: str
    name: str
    input: dict[str, Any] = {}


Block = TextBlock | ThinkingBlock | ToolUseBlock


class MessageUsage(msgspec.Struct):
    """Counts of tokens; of the prompt, `input_tokens` leaves out those that were found in the prefix cache."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int = 0


class Message(msgspec.Struct, tag_field="type", tag="message", kw_only=True):
    """The assistant's. `stop_reason` is None until its end."""

    id: str
    role: str = "assistant"
    model: str
    content: list[Block] = []
    stop_reason: str | None = None
    stop_sequence: str | None = None
    usage: MessageUsage


class MessageStreamEvent(msgspec.Struct, tag_field="type"):
    """One event."""

    @property
    def name(self) -> str:
        """Its type."""
        return str(self.__struct_config__.tag)


class MessageStart(MessageStreamEvent, tag="message_start"):
    """The message, without content."""

    message: Message


class PingEvent(MessageStreamEvent, tag="ping"):
    """The connection lives."""


class BlockStart(MessageStreamEvent, tag="content_block_start"):
    """A block begins; it is empty."""

    index: int
    content_block: Block


class TextDelta(msgspec.Struct, tag_field="type", tag="text_delta"):
    """More of what the assistant says."""

    text: str


class ThinkingDelta(msgspec.Struct, tag_field="type", tag="thinking_delta"):
    """More of what the model thinks."""

    thinking: str


class InputJsonDelta(msgspec.Struct, tag_field="type", tag="input_json_delta"):
    """More of the JSON text of a call's input."""

    partial_json: str


class BlockDelta(MessageStreamEvent, tag="content_block_delta"):
    """A block grows."""

    index: int
    delta: TextDelta | ThinkingDelta | InputJsonDelta


class BlockStop(MessageStreamEvent, tag="content_block_stop"):
    """A block has ended."""

    index: int


class Stop(msgspec.Struct):
    """Why the message ends."""

    stop_reason: str | None
    stop_sequence: str | None


class MessageDelta(MessageStreamEvent, tag="message_delta"):
    """What is known of the message at its end."""

    delta: Stop
    usage: MessageUsage


class MessageStop(MessageStreamEvent, tag="message_stop"):
    """The message has ended."""


class TokenCount(msgspec.Struct):
    """The tokens of a prompt."""

    input_tokens: int


EVENTS = (MessageStart, PingEvent, BlockStart, BlockDelta, BlockStop, MessageDelta, MessageStop)
