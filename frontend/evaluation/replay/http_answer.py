"""Answer of an OpenAI-compatible server, as it arrives."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from quire.frontend.evaluation.replay.record import Outcome, RequestRecord, RunClock

_REFUSALS = (429, 503)
_MOST_EVENT_BYTES = 1 << 26
_MOST_ERROR_BYTES = 1 << 16
_MOST_ERROR_CHARACTERS = 500


class _Delta(msgspec.Struct):
    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None

    @property
    def has_tokens(self) -> bool:
        """True unless this is the first chunk of a chat, which has only the role; a token may have no text."""
        return bool(self.content or self.reasoning_content or self.reasoning) or self.role is None


class _StreamedChoice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the chunk: one unless it has token ids."""
        if self.token_ids is not None:
            return len(self.token_ids)
        if self.finish_reason is not None:  # the last token may come with the end, or the end alone
            return bool(self.text or (self.delta and self.delta.content))
        return self.delta is None or self.delta.has_tokens


class _TokenDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _TokenDetails | None = None


class _Chunk(msgspec.Struct):
    choices: list[_StreamedChoice] = []
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Chunk).decode


class EventLines:
    """Splitter of a stream into the data of its server-sent events, each of which is one line in OpenAI's API.

    Raises `ValueError` for an event longer than 64 MiB.
    """

    def __init__(self) -> None:
        self._begun = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Take a piece of the stream; return the data of the events that are now complete."""
        *lines, self._begun = (self._begun + data).split(b"\n") if self._begun else data.split(b"\n")
        if len(self._begun) > _MOST_EVENT_BYTES:
            raise ValueError(f"an event of the stream is longer than {_MOST_EVENT_BYTES >> 20} MiB")
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]


class StreamedResponse:
    """The record of one request, filled from the stream. Raises `ValueError` for anything else than such a stream."""

    def __init__(self, record: RequestRecord, clock: RunClock) -> None:
        self._record = record
        self._begin = clock.begin
        self._events = EventLines()
        self._status = 0
        self._error = b""
        self._is_done = False
        self._has_ended = False  # a choice has a finish reason
        self._usage: _Usage | None = None  # of the current piece

    def on_status(self, status: int) -> None:
        """Take the status."""
        self._status = status

    def on_body(self, data: bytes) -> None:
        """Take a piece of the stream, or of the body of an error."""
        if self._status != 200:
            self._error = (self._error + data)[:_MOST_ERROR_BYTES]
            return
        now = time.monotonic() - self._begin
        count = 0
        for event in self._events.feed(data):
            if event == b"[DONE]":
                self._is_done = True
            else:
                count += self._take(event)
        if count:
            self._record.grow(count, now)
        if self._usage is not None:  # after the tokens of the same piece, which it includes
            self._count(self._usage)
            self._usage = None

    def end(self) -> None:
        """End the answer, and set its outcome."""
        record = self._record
        if self._status != 200:
            record.outcome = Outcome.REFUSED if self._status in _REFUSALS else Outcome.ERRORED
            record.error = f"status {self._status}: {_message(self._error)}"
        elif record.outcome is Outcome.ERRORED:
            pass  # an event had the error
        elif not (self._is_done or self._has_ended):
            self.fail("the stream ended before the answer did")
        elif record.first_token is None:
            self.fail("the stream has no tokens")
        else:
            record.outcome = Outcome.COMPLETED

    def fail(self, error: str) -> None:
        """End the answer with an error."""
        self._record.outcome, self._record.error = Outcome.ERRORED, error

    def _take(self, event: bytes) -> int:
        """Read an event; return its number of tokens."""
        try:
            chunk = _decode(event)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"an event of the stream is not a chunk of an answer ({error}): {_cut(event)}") from None
        if chunk.error is not None:
            self.fail(_message(msgspec.json.encode({"error": chunk.error})))
        if chunk.usage is not None:
            self._usage = chunk.usage
        for choice in chunk.choices:
            self._has_ended |= choice.finish_reason is not None
        return sum(choice.num_tokens for choice in chunk.choices)

    def _count(self, usage: _Usage) -> None:
        """Take the server's counts, which are exact; a chunk may have several tokens."""
        record = self._record
        record.prompt_tokens = usage.prompt_tokens or record.prompt_tokens
        if usage.completion_tokens is not None:
            record.output_tokens = usage.completion_tokens
        if usage.prompt_tokens_details is not None:
            record.cached_tokens = usage.prompt_tokens_details.cached_tokens


class WholeResponse:
    """An answer that is read to its end, with its status and body."""

    def __init__(self, most_bytes: int = 1 << 24) -> None:
        self.status = 0
        self.body = b""
        self._most = most_bytes

    def on_status(self, status: int) -> None:
        """Take the status."""
        self.status = status

    def on_body(self, data: bytes) -> None:
        """Take a piece of the body. Raises `ValueError` if the body gets too long."""
        self.body += data
        if len(self.body) > self._most:
            raise ValueError(f"the answer is longer than {self._most} bytes")


def _message(body: bytes) -> str:
    """Return the `message` of an error in OpenAI's shape, or else the whole body."""
    try:
        content = msgspec.json.decode(body)
    except (ValueError, RecursionError):
        return _cut(body)
    error = content.get("error", content) if isinstance(content, dict) else content
    message = error.get("message", error) if isinstance(error, dict) else error
    return str(message)[:_MOST_ERROR_CHARACTERS]


def _cut(body: bytes) -> str:
    return body[:_MOST_ERROR_CHARACTERS].decode(errors="replace")
