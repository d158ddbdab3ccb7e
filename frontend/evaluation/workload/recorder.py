"""Records the requests of a server as a trace that `read_trace` reads: Mooncake's JSON lines, and some fields more."""

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
"""Tokens of a block: those of a KV page, the least that prompts share."""

MOST_HELD_BYTES = 1 << 26
"""Of the lines that wait for a request that came before theirs."""

_DEFAULTS = SamplingParams()
# What says words, or names tokens that do.
_WORDS = {"stop", "bad_words", "bad_words_token_ids", "logit_bias", "allowed_token_ids", "structured_outputs"}


class RecordedRow(msgspec.Struct, omit_defaults=True):
    """A line: milliseconds since the recording began, lengths in tokens, why it ended, and how it was asked for."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]
    block_tokens: int = 0
    finish_reason: str | None = None
    params: dict[str, Any] | None = None
    text_input: str | None = None


@dataclass(slots=True)
class _Entry:
    """A request in the order of arrival; `line` is there once it has ended."""

    request: OpenRequest
    timestamp: float
    names: list[int]
    line: bytes | None = None


class Recorder:
    """An `Observer` that writes a line for each generation: when it came, its lengths, prefix and parameters.

    Lines are in the order of arrival, so one waits until all requests before it have ended. If too much waits, the
    first that is still open is recorded with the tokens that it has; so it is at the end, with the reason "unfinished".
    A request that ended before its first token counts as one of 1 token, since it was asked for; of several completions
    the longest counts.

    There is no text unless `with_text`: then the prompt as the model gets it, where it came as text, and the parameters
    that hold words. Raises OSError if the file can't be made, or is there already; later failures are logged.
    """

    def __init__(self, path: Path, *, with_text: bool = False) -> None:
        self._writer = LineWriter(path)
        self._with_text = with_text
        self._began = time.monotonic()
        self._names = PrefixNames(RECORDED_BLOCK_TOKENS)
        self._entries: deque[_Entry] = deque()
        self._open: dict[OpenRequest, _Entry] = {}
        self._held_bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def num_recorded(self) -> int:
        """Lines that are in the file."""
        return self._writer.num_written

    def close(self) -> None:
        """Records what is open still, and closes the file. Nothing is observed after that."""
        for entry in list(self._open.values()):
            self._end(entry, "unfinished")
        self._write_ended()
        self._writer.close()

    def on_submitted(self, request: OpenRequest) -> None:
        """See `Observer`. An embedding has no answer, and no line."""
        if request.params is None:
            return
        names = self._names.names(request.prompt.token_ids, request.options.cache_salt)
        entry = _Entry(request, (time.monotonic() - self._began) * 1000, names)
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

    def _end(self, entry: _Entry, reason: str) -> None:
        del self._open[entry.request]
        row = self._row(entry, reason)
        try:
            line = msgspec.json.encode(row)
        except UnicodeEncodeError:  # half of a surrogate pair, which no file in UTF-8 has
            line = msgspec.json.encode(msgspec.structs.replace(row, params=None, text_input=None))
        entry.line = line + b"\n"
        self._held_bytes += len(entry.line)

    def _write_ended(self) -> None:
        while self._entries and (line := self._entries[0].line) is not None:
            self._entries.popleft()
            self._held_bytes -= len(line)
            self._writer.put(line)

    def _row(self, entry: _Entry, reason: str) -> RecordedRow:
        request = entry.request
        return RecordedRow(
            round(entry.timestamp, 3),
            len(request.prompt.token_ids),
            max(1, request.longest_output),
            entry.names,
            RECORDED_BLOCK_TOKENS,
            reason,
            _asked(request.params or _DEFAULTS, self._with_text) or None,
            request.prompt.text if self._with_text else None,
        )


def _asked(params: SamplingParams, with_words: bool) -> dict[str, Any]:
    """The parameters that are not what they are if nothing is said."""
    asked: dict[str, Any] = {}
    for name in SamplingParams.__struct_fields__:
        value = getattr(params, name)
        if value != getattr(_DEFAULTS, name) and (with_words or name not in _WORDS):
            asked[name] = value
    if params.structured_outputs is not None and with_words:
        asked["structured_outputs"] = msgspec.structs.asdict(params.structured_outputs)
    return asked
