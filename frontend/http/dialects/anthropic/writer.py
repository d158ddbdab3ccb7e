"""The message of an answer and its events, and the writer that builds them from a conversation's answer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from quire.frontend.http.conversation import AnswerDelta, Conversation, EventWriter, arguments_object
from quire.frontend.http.dialects.anthropic.body import FIELD_NAMES, MessagesBody
from quire.frontend.http.dialects.anthropic.errors import anthropic_error
from quire.frontend.http.service import ModelService
from quire.frontend.http.transport.sse import event
from quire.frontend.text.chat.events import ContentDelta, Event, ReasoningDelta, ToolCallArguments, ToolCallStart


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


class Content:
    """Builds the content blocks of a message from the events of its answer.

    `blocks` are in the order in which they began; the last one is empty until it has ended. `shows_thinking`: whether
    thinking blocks have their text.
    """

    def __init__(self, shows_thinking: bool) -> None:
        self.blocks: list[Block] = []
        self._shows_thinking = shows_thinking
        self._written: list[str] | None = None  # text of the last block, None if there is none or it has ended

    def take(self, events: list[Event]) -> Iterator[MessageStreamEvent]:
        """Add events of the answer."""
        for each in events:
            match each:
                case ContentDelta(text):
                    yield from self._grow(TextBlock(), text, TextDelta(text))
                case ReasoningDelta(text):
                    shown = text if self._shows_thinking else ""
                    yield from self._grow(ThinkingBlock(), shown, ThinkingDelta(shown))
                case ToolCallStart(_, call_id, name):
                    yield from self._begin(ToolUseBlock(call_id, name))
                case ToolCallArguments(_, text):
                    yield from self._grow(self.blocks[-1], text, InputJsonDelta(text))

    def end(self) -> Iterator[MessageStreamEvent]:
        """End the last block."""
        if self._written is None:
            return
        text, self._written = "".join(self._written), None
        match self.blocks[-1]:
            case TextBlock() as block:
                block.text = text
            case ThinkingBlock() as thoughts:
                thoughts.thinking = text
            case ToolUseBlock() as call:
                call.input = arguments_object(text)
        yield BlockStop(len(self.blocks) - 1)

    def _grow(self, block: Block, text: str, delta: Any) -> Iterator[MessageStreamEvent]:
        """Add to the last block, or begin `block` if the last one is of another type."""
        if self._written is None or type(self.blocks[-1]) is not type(block):
            yield from self._begin(block)
        assert self._written is not None
        if text:
            self._written.append(text)
            yield BlockDelta(len(self.blocks) - 1, delta)

    def _begin(self, block: Block) -> Iterator[MessageStreamEvent]:
        yield from self.end()
        self.blocks.append(block)
        self._written = []
        yield BlockStart(len(self.blocks) - 1, block)


# "timeout": clients take pause_turn for the pause of a server tool.
_STOP_REASONS = {"stop": "end_turn", "tool_calls": "tool_use", "timeout": "max_tokens"}


class MessageWriter(EventWriter[Message, MessageStreamEvent]):
    """Writes one message."""

    def __init__(
        self, service: ModelService, body: MessagesBody, conversation: Conversation, answer_id: str, request_id: str
    ) -> None:
        content = Content(body.thinking is None or body.thinking.display != "omitted")
        usage = MessageUsage(len(conversation.token_ids), 0, 0)
        message = Message(id=answer_id, model=service.name, content=content.blocks, usage=usage)
        super().__init__(service, conversation, message, FIELD_NAMES)
        self._body = body
        self._request_id = request_id
        self._content = content

    def explain(self, error: Exception) -> bytes:
        """Return the last event of a failed stream."""
        return event(msgspec.json.encode(anthropic_error(self._service.api_error(error), self._request_id)), "error")

    def _encoded(self, each: MessageStreamEvent) -> bytes:
        return event(msgspec.json.encode(each), each.name)

    def _take(self, delta: AnswerDelta) -> Iterator[MessageStreamEvent]:
        self._tally.add_delta(delta.output, delta.completion)
        self._answer.usage = self._usage()
        if not self._begun:
            self._begun = True
            yield MessageStart(self._answer)
            yield PingEvent()
        yield from self._content.take(delta.events)
        if delta.finish_reason is not None:
            yield from self._end(delta)

    def _end(self, delta: AnswerDelta) -> Iterator[MessageStreamEvent]:
        yield from self._content.end()
        message, stop = self._answer, delta.completion.stop_reason
        message.stop_reason = self._stop_reason(delta.finish_reason or "stop")
        if message.stop_reason == "end_turn" and isinstance(stop, str):
            message.stop_reason, message.stop_sequence = "stop_sequence", stop
        yield MessageDelta(Stop(message.stop_reason, message.stop_sequence), message.usage)
        yield MessageStop()

    def _stop_reason(self, reason: str) -> str:
        if reason == "length":
            full = self._answer.usage.output_tokens < self._body.max_tokens
            return "model_context_window_exceeded" if full else "max_tokens"
        return _STOP_REASONS[reason]

    def _usage(self) -> MessageUsage:
        usage = self._tally.usage
        cached = usage.prompt_tokens_details.cached_tokens
        return MessageUsage(usage.prompt_tokens - cached, usage.completion_tokens, cached)
