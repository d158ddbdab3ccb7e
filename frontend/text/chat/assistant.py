"""The parser that turns a model's text into an assistant's message, whole or while it streams."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from quire.frontend.text.chat.events import (
    ContentDelta,
    Event,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallStart,
    merged,
)
from quire.frontend.text.chat.marked_calls import ToolParser


class ToolCall(msgspec.Struct, frozen=True):
    """A call of the function `name`; `arguments` is the JSON text as the model wrote it, maybe cut off or invalid."""

    id: str
    name: str
    arguments: str


class AssistantMessage(msgspec.Struct, frozen=True):
    """An answer; `content` is None if it has tool calls (or had to have them) and nothing else."""

    content: str | None
    reasoning_content: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()

    def as_message(self) -> dict[str, Any]:
        """Return the message in OpenAI's form, to append to the conversation."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning_content is not None:
            message["reasoning_content"] = self.reasoning_content
        if self.tool_calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in self.tool_calls
            ]
        return message


@dataclass(slots=True)
class _Call:
    id: str
    name: str
    arguments: list[str]

    @property
    def is_whole(self) -> bool:
        """True if the arguments are a JSON object."""
        try:
            msgspec.json.decode("".join(self.arguments), type=dict[str, Any])
        except (msgspec.DecodeError, RecursionError):
            return False
        return True


class AnswerSplitter(Protocol):
    """A parser that splits an answer into events, such as a `ReasoningParser`, which finds no calls."""

    def feed(self, delta: str) -> list[Event]:
        """Parse the next piece of the text; return the events that are certain now."""

    def finish(self) -> list[Event]:
        """End the text; return the events that were held back."""


class AssistantParser:
    """Parser of an answer that arrives in pieces, cut anywhere; it accumulates the message.

    Without a splitter nothing is reasoning; a tool parser finds calls in the content that the splitter leaves. Calls
    after the first are dropped unless `parallel_tool_calls`. With `only_calls` the answer must consist of calls: other
    text can only be the start of a call that was cut off, and is dropped.
    """

    def __init__(
        self,
        tool_parser: ToolParser | None = None,
        splitter: AnswerSplitter | None = None,
        parallel_tool_calls: bool = True,
        only_calls: bool = False,
    ) -> None:
        self._tools = tool_parser
        self._splitter = splitter
        self._parallel = parallel_tool_calls
        self._only_calls = only_calls
        self._content: list[str] = []
        self._thoughts: list[str] = []
        self._calls: list[_Call] = []

    def feed(self, delta: str) -> list[Event]:
        """Parse the next piece of the text; return the events that are certain now, adjacent ones merged."""
        split: list[Event] = [ContentDelta(delta)] if self._splitter is None else self._splitter.feed(delta)
        return self._keep(self._find_calls(split))

    def finish(self) -> list[Event]:
        """End the text; return the events that were held back."""
        events = self._find_calls([] if self._splitter is None else self._splitter.finish())
        return self._keep(events + ([] if self._tools is None else self._tools.finish()))

    @property
    def message(self) -> AssistantMessage:
        """The message so far; complete after `finish`."""
        content = "".join(self._content)
        return AssistantMessage(
            content=content if content or not (self._calls or self._only_calls) else None,
            reasoning_content="".join(self._thoughts) or None,
            tool_calls=tuple(ToolCall(call.id, call.name, "".join(call.arguments)) for call in self._calls),
        )

    def cuts_call(self, reason: str | None, stop: int | str | None = None) -> bool:
        """Return whether the end of the answer cut its last call off, by the engine's `reason` and `stop`.

        `stop` is the stop string or token that ended the answer, None if the model ended it.
        """
        ended_by_model = reason == "stop" and stop is None
        return reason is not None and not ended_by_model and bool(self._calls) and not self._calls[-1].is_whole

    def finish_reason(self, reason: str | None, stop: int | str | None = None) -> str | None:
        """Return the finish reason of the answer from the engine's `reason` and `stop`, as `cuts_call` has them.

        A stop after calls is "tool_calls", unless it cut the last one off.
        """
        return "tool_calls" if self._calls and reason == "stop" and not self.cuts_call(reason, stop) else reason

    def _find_calls(self, events: Iterable[Event]) -> list[Event]:
        found: list[Event] = []
        for event in events:
            if self._tools is not None and isinstance(event, ContentDelta):
                found += self._tools.feed(event.text)
            else:
                found.append(event)
        return found

    def _keep(self, events: list[Event]) -> list[Event]:
        return [event for event in merged(events) if self._add(event)]

    def _add(self, event: Event) -> bool:
        """Add an event to the message; return False if it is empty or dropped."""
        if isinstance(event, ContentDelta):
            if self._only_calls:
                return False
            self._content.append(event.text)
            return bool(event.text)
        if isinstance(event, ReasoningDelta):
            self._thoughts.append(event.text)
            return True
        if event.index > 0 and not self._parallel:
            return False
        if isinstance(event, ToolCallStart):
            self._calls.append(_Call(event.id, event.name, []))
        elif isinstance(event, ToolCallArguments):
            self._calls[event.index].arguments.append(event.delta)
        return True


def parse_answer(text: str, parser: AssistantParser) -> AssistantMessage:
    """Parse a whole answer with a fresh `parser`; return its message."""
    parser.feed(text)
    parser.finish()
    return parser.message
