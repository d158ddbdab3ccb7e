"""The answers of Ollama's API and their lines, and the writers that build them from a conversation's answer."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Generic, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from quire.frontend.http.conversation import AnswerDelta, Conversation, EventWriter, arguments_object
from quire.frontend.http.dialects.ollama.errors import OllamaErrorResponse
from quire.frontend.http.dialects.ollama.options import FIELD_NAMES
from quire.frontend.http.service import ModelService
from quire.frontend.http.transport.sse import JSON_LINES, StreamFormat
from quire.frontend.outputs import RequestMetrics
from quire.frontend.text.chat.events import ContentDelta, Event, ReasoningDelta, ToolCallArguments, ToolCallStart

_DONE_REASONS = {"tool_calls": "stop", "timeout": "length"}  # clients know stop, length and load

LOADED, UNLOADED = "load", "unload"
"""The reasons for which an answer without a prompt is done."""


class OllamaAnswer(msgspec.Struct, kw_only=True):
    """Fields of all answers, and of lines of them; only the last line has the reason, the counts and the durations.

    Durations are nanoseconds: `load_duration` until the engine began with the prompt, which includes waiting;
    `prompt_eval_duration` until the first token, `eval_duration` from there to the last.
    """

    model: str
    created_at: str
    done: bool = False
    done_reason: str | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET


class GeneratedText(OllamaAnswer, kw_only=True):
    """The answer to a prompt, or a piece of it."""

    response: str = ""
    thinking: str | UnsetType = UNSET


class CallToMake(msgspec.Struct):
    """The function of a tool call; `index` is its place among the calls of the answer."""

    index: int
    name: str
    arguments: dict[str, Any]


class ToolCallToMake(msgspec.Struct):
    """A tool call that the client should make."""

    id: str
    function: CallToMake


class AnswerMessage(msgspec.Struct, kw_only=True):
    """The assistant's message."""

    role: str = "assistant"
    content: str = ""
    thinking: str | UnsetType = UNSET
    tool_calls: list[ToolCallToMake] | UnsetType = UNSET


class ChatAnswer(OllamaAnswer, kw_only=True):
    """The answer to a conversation, or a piece of it."""

    message: AnswerMessage = msgspec.field(default_factory=AnswerMessage)


def now() -> str:
    """Return the time as RFC 3339 has it."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def nanoseconds(begin: float | None, end: float | None) -> int:
    """Return the time from `begin` to `end`, which are seconds of one clock; 0 if the one or the other is not known."""
    return 0 if begin is None or end is None else max(0, round((end - begin) * 1e9))


@dataclass(slots=True)
class Piece:
    """Increment of an answer in one line."""

    content: str = ""
    thinking: str = ""
    calls: list[ToolCallToMake] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        """True if it adds nothing."""
        return not (self.content or self.thinking or self.calls)


class Pieces:
    """Builds pieces from the events of an answer; a call waits for its arguments' end, and is none without it."""

    def __init__(self) -> None:
        self._call: ToolCallStart | None = None  # the open one
        self._arguments: list[str] = []

    def take(self, events: Sequence[Event]) -> Piece:
        """Return what events add."""
        piece = Piece()
        for each in events:
            match each:
                case ContentDelta(text):
                    piece.content += text
                case ReasoningDelta(text):
                    piece.thinking += text
                case ToolCallStart():
                    piece.calls += self.end()
                    self._call = each
                case ToolCallArguments(_, text):
                    self._arguments.append(text)
        return piece

    def end(self) -> list[ToolCallToMake]:
        """Return the open call, if there is one; it has ended."""
        if self._call is None:
            return []
        called, arguments = self._call, arguments_object("".join(self._arguments))
        self._call, self._arguments = None, []
        return [ToolCallToMake(called.id, CallToMake(called.index, called.name, arguments))]


A = TypeVar("A", bound=OllamaAnswer)


class AnswerWriter(EventWriter[A, A], Generic[A]):
    """Writes one answer, whole or in lines. `began`: the time of the request, as `time.monotonic()`."""

    def __init__(self, service: ModelService, conversation: Conversation, model: str, began: float) -> None:
        self._model = model
        self._began = began
        self._pieces = Pieces()
        self._content: list[str] = []
        self._thinking: list[str] = []
        self._calls: list[ToolCallToMake] = []
        super().__init__(service, conversation, self.line(Piece()), FIELD_NAMES)

    @property
    def form(self) -> StreamFormat:
        """The form of a stream; a sign of life is a line that adds nothing."""
        return StreamFormat(JSON_LINES, self._encoded(self.line(Piece())))

    def explain(self, error: Exception) -> bytes:
        """Return the last line of a failed stream."""
        return _encoded(OllamaErrorResponse(self._service.api_error(error).message))

    @abstractmethod
    def line(self, piece: Piece) -> A:
        """Return a line with a piece of the answer."""

    def _encoded(self, each: A) -> bytes:
        return _encoded(each)

    def _take(self, delta: AnswerDelta) -> Iterator[A]:
        self._tally.add_delta(delta.output, delta.completion)
        piece = self._pieces.take(delta.events)
        if delta.finish_reason is not None and not delta.cuts_call:
            piece.calls += self._pieces.end()
        self._content.append(piece.content)
        self._thinking.append(piece.thinking)
        self._calls += piece.calls
        if not piece.is_empty:
            yield self.line(piece)
        if delta.finish_reason is not None:
            self._answer = self.line(Piece("".join(self._content), "".join(self._thinking), self._calls))
            last = self.line(Piece())
            for each in (self._answer, last):
                self._end(each, delta.finish_reason, delta.output.metrics)
            yield last

    def _end(self, answer: A, reason: str, metrics: RequestMetrics) -> None:
        usage = self._tally.usage
        answer.done, answer.done_reason = True, _DONE_REASONS.get(reason, reason)
        answer.total_duration = nanoseconds(self._began, time.monotonic())
        answer.load_duration = nanoseconds(self._began, metrics.first_scheduled_time)
        answer.prompt_eval_count = usage.prompt_tokens
        answer.prompt_eval_duration = nanoseconds(metrics.first_scheduled_time, metrics.first_token_time)
        answer.eval_count = usage.completion_tokens
        answer.eval_duration = nanoseconds(metrics.first_token_time, metrics.finished_time)


class TextWriter(AnswerWriter[GeneratedText]):
    """Writes the answer to a prompt."""

    def line(self, piece: Piece) -> GeneratedText:
        """Return a line with a piece of the answer."""
        thinking = piece.thinking or UNSET
        return GeneratedText(model=self._model, created_at=now(), response=piece.content, thinking=thinking)


class ChatAnswerWriter(AnswerWriter[ChatAnswer]):
    """Writes the answer to a conversation."""

    def line(self, piece: Piece) -> ChatAnswer:
        """Return a line with a piece of the answer."""
        thinking, calls = piece.thinking or UNSET, piece.calls or UNSET
        message = AnswerMessage(content=piece.content, thinking=thinking, tool_calls=calls)
        return ChatAnswer(model=self._model, created_at=now(), message=message)


def _encoded(line: msgspec.Struct) -> bytes:
    return msgspec.json.encode(line) + b"\n"
