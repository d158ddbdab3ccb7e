"""Recorder of a server's requests as a trace for `read_trace`: Mooncake's JSON lines with additional fields."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from quire.frontend.client.observer import OpenRequest
from quire.frontend.evaluation.workload.line_writer import LineWriter
from quire.frontend.evaluation.workload.prefix_names import PrefixNames
from quire.protocol.messages import SamplingParams

RECORDED_BLOCK_TOKENS = 32
"""Tokens of a block: those of a KV page, the smallest unit that prompts share."""

MOST_HELD_BYTES = 1 << 26
"""Upper limit on the lines that wait for an earlier request to end."""

_DEFAULTS = SamplingParams()
# Parameters that hold text, or tokens of a text.
_TEXT_PARAMS = {"stop", "bad_words", "bad_words_token_ids", "logit_bias", "allowed_token_ids", "structured_outputs"}


class RecordedRow(msgspec.Struct, omit_defaults=True):
    """A line: milliseconds since the recording began, lengths in tokens, the finish reason, and the parameters."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]
    block_tokens: int = 0
    finish_reason: str | None = None
    params: dict[str, Any] | None = None
    text_input: str | None = None


@dataclass(slots=True)
class _RecordedRequest:
    """A request in the order of arrival; `line` is set once it has ended."""

    request: OpenRequest
    timestamp: float
    names: list[int]
    line: bytes | None = None


class TraceRecorder:
    """An `Observer` that writes a line for each generation: its time of arrival, lengths, prefix and parameters.

    Lines are in the order of arrival, so each waits until all earlier requests have ended. If too much waits, the
    oldest open request is recorded with the tokens that it has and the reason "unfinished", as all open ones are at the
    end. A request that ended before its first token counts as one of 1 token; of several completions the longest
    counts.

    There is no text unless `with_text`: then the prompt as the model gets it, where it came as text, and the parameters
    that hold text. Raises OSError if the file cannot be created, or exists already; later failures are logged.
    """

    def __init__(self, path: Path, *, with_text: bool = False) -> None:
        self._writer = LineWriter(path)
        self._with_text = with_text
        self._began = time.monotonic()
        self._names = PrefixNames(RECORDED_BLOCK_TOKENS)
        self._entries: deque[_RecordedRequest] = deque()
        self._open: dict[OpenRequest, _RecordedRequest] = {}
        self._held_bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def num_recorded(self) -> int:
        """Number of lines in the file."""
        return self._writer.num_written

    def close(self) -> None:
        """Record the open requests, and close the file. Nothing is observed after that."""
        for entry in list(self._open.values()):
            self._end(entry, "unfinished")
        self._write_ended()
        self._writer.close()

    def on_submitted(self, request: OpenRequest) -> None:
        """See `Observer`. An embedding has no answer, and is not recorded."""
        if request.params is None:
            return
        names = self._names.names(request.prompt.token_ids, request.options.cache_salt)
        entry = _RecordedRequest(request, (time.monotonic() - self._began) * 1000, names)
        self._entries.append(entry)
        self._open[request] = entry

    def on_first_tokens(self, request: OpenRequest, timestamp: float) -> None:
        """See `Observer`."""

    def on_tokens(self, num_tokens: int, gaps: list[float], timestamp: float) -> None:
        """See `Observer`."""

    def on_finished(self, request: OpenRequest, timestamp: float) -> None:
        """See `Observer`."""
        if (entry := self._open.get(request)) is None:
            return
        self._end(entry, "error" if request.error is not None else request.finish_reasons[0])
        self._write_ended()
        while self._held_bytes > MOST_HELD_BYTES:
            self._end(self._entries[0], "unfinished")
            self._write_ended()

    def _end(self, entry: _RecordedRequest, reason: str) -> None:
        del self._open[entry.request]
        row = self._row(entry, reason)
        try:
            line = msgspec.json.encode(row)
        except UnicodeEncodeError:  # half of a surrogate pair, which UTF-8 cannot encode
            line = msgspec.json.encode(msgspec.structs.replace(row, params=None, text_input=None))
        entry.line = line + b"\n"
        self._held_bytes += len(entry.line)

    def _write_ended(self) -> None:
        while self._entries and (line := self._entries[0].line) is not None:
            self._entries.popleft()
            self._held_bytes -= len(line)
            self._writer.put(line)

    def _row(self, entry: _RecordedRequest, reason: str) -> RecordedRow:
        request = entry.request
        return RecordedRow(
            round(entry.timestamp, 3),
            len(request.prompt.token_ids),
            max(1, request.longest_output),
            entry.names,
            RECORDED_BLOCK_TOKENS,
            reason,
            _requested(request.params or _DEFAULTS, self._with_text) or None,
            request.prompt.text if self._with_text else None,
        )


def _requested(params: SamplingParams, with_text: bool) -> dict[str, Any]:
    """Return the parameters that differ from the defaults."""
    requested: dict[str, Any] = {}
    for name in SamplingParams.__struct_fields__:
        value = getattr(params, name)
        if value != getattr(_DEFAULTS, name) and (with_text or name not in _TEXT_PARAMS):
            requested[name] = value
    if params.structured_outputs is not None and with_text:
        requested["structured_outputs"] = msgspec.structs.asdict(params.structured_outputs)
    return requested
