"""Writes what comes of a conversation as a message, whole or as events."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing

import msgspec

from quire.frontend.http.anthropic.body import WORDS, MessagesBody
from quire.frontend.http.anthropic.content import Content
from quire.frontend.http.anthropic.errors import error_body
from quire.frontend.http.anthropic.message import (
    Message,
    MessageDelta,
    MessageStart,
    MessageStop,
    Ping,
    Stop,
    StreamEvent,
    Usage,
)
from quire.frontend.http.conversation import Conversation, Delta
from quire.frontend.http.openai.usage import Tally
from quire.frontend.http.service import Service
from quire.frontend.http.transport.sse import event
from quire.frontend.http.wording import worded

# "timeout" and "abort": the client may send the message back to have it continued, which is what pause_turn means.
_STOP_REASONS = {"stop": "end_turn", "tool_calls": "tool_use", "timeout": "pause_turn", "abort": "pause_turn"}


class MessageWriter:
    """One message on its way."""

    def __init__(
        self, service: Service, body: MessagesBody, conversation: Conversation, answer_id: str, request_id: str
    ) -> None:
        self._service = service
        self._body = body
        self._conversation = conversation
        self._request_id = request_id
        self._content = Content(body.thinking is None or body.thinking.display != "omitted")
        self._tally = Tally()
        self._begun = False
        self._message = Message(
            id=answer_id,
            model=service.name,
            content=self._content.blocks,
            usage=Usage(len(conversation.token_ids), 0, 0),
        )

    async def whole(self) -> Message:
        """The message at its end."""
        async with aclosing(self._events()) as events:
            async for _ in events:
                pass
        return self._message

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """The events as they are sent."""
        async with aclosing(self._events()) as events:
            async for each in events:
                yield event(msgspec.json.encode(each), each.name)

    def explain(self, error: Exception) -> bytes:
        """The last event of a stream that has begun and fails."""
        return event(msgspec.json.encode(error_body(self._service.refusal(error), self._request_id)), "error")

    async def _events(self) -> AsyncGenerator[StreamEvent, None]:
        """Each is to be encoded before the next is asked for, as what it holds goes on growing."""
        with worded(WORDS):
            async with aclosing(self._conversation.deltas(self._service.llm)) as deltas:
                async for delta in deltas:
                    for each in self._take(delta):
                        yield each

    def _take(self, delta: Delta) -> Iterator[StreamEvent]:
        self._tally.add_delta(delta.output, delta.completion)
        self._message.usage = self._usage()
        if not self._begun:
            self._begun = True
            yield MessageStart(self._message)
            yield Ping()
        yield from self._content.take(delta.events)
        if delta.finish_reason is not None:
            yield from self._end(delta)

    def _end(self, delta: Delta) -> Iterator[StreamEvent]:
        yield from self._content.end()
        message, stop = self._message, delta.completion.stop_reason
        message.stop_reason = self._stop_reason(delta.finish_reason or "stop")
        if message.stop_reason == "end_turn" and isinstance(stop, str):
            message.stop_reason, message.stop_sequence = "stop_sequence", stop
        yield MessageDelta(Stop(message.stop_reason, message.stop_sequence), message.usage)
        yield MessageStop()

    def _stop_reason(self, reason: str) -> str:
        if reason == "length":
            full = self._message.usage.output_tokens < self._body.max_tokens
            return "model_context_window_exceeded" if full else "max_tokens"
        return _STOP_REASONS[reason]

    def _usage(self) -> Usage:
        usage = self._tally.usage
        cached = usage.prompt_tokens_details.cached_tokens
        return Usage(usage.prompt_tokens - cached, usage.completion_tokens, cached)
