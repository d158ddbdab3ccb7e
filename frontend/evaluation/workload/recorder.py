"""Recorder of a server's requests as a trace for `read_trace`: Mooncake's JSON lines with additional fields."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from array import array
from collections import OrderedDict, deque
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO, Self

import msgspec

from quire.frontend.client.observer import OpenRequest
from quire.protocol.messages import SamplingParams

MOST_KNOWN = 1 << 18
"""Number of remembered blocks, in some 50 MB; 8 million tokens in blocks of 32."""


class PrefixNames:
    """Names that count up from 0, so that they reveal nothing of their blocks; a name is unique to its prefix.

    The least recently used prefixes are forgotten, the last block of a prompt first; a forgotten block gets a new name.
    Only hashes under a random key are kept, no tokens.
    """

    def __init__(self, block_tokens: int, most_known: int = MOST_KNOWN) -> None:
        self._width = block_tokens * array("I").itemsize
        self._most_known = most_known
        self._key = secrets.token_bytes(32)
        self._names: OrderedDict[bytes, int] = OrderedDict()
        self._fresh = count()

    def names(self, token_ids: list[int], salt: str = "") -> list[int]:
        """Return the names of a prompt's blocks, of which the last may be partial. Another salt has other names."""
        digests = self._digests(array("I", token_ids).tobytes(), salt)
        names, known = [], self._names
        for digest in digests:
            name = known.get(digest)
            if name is None:
                name = known[digest] = next(self._fresh)
            names.append(name)
        for digest in reversed(digests):
            known.move_to_end(digest)
        while len(known) > self._most_known:
            known.popitem(last=False)
        return names

    def _digests(self, tokens: bytes, salt: str) -> list[bytes]:
        """Return a digest for each block, which depends on all blocks before it."""
        digest = blake2b(salt.encode(errors="surrogatepass"), key=self._key, digest_size=16).digest()
        digests = []
        for start in range(0, len(tokens), self._width):
            digest = blake2b(tokens[start : start + self._width], key=digest, digest_size=16).digest()
            digests.append(digest)
        return digests


_MOST_WAITING = 1 << 26  # bytes that wait for the disk
_CLOSE_SECONDS = 10.0  # for which `close` waits for the disk

_LOGGER = logging.getLogger(__name__)


class LineWriter:
    """A new file and a thread that writes to it. A failure is logged once, and later lines are lost.

    `num_written` and `num_lost` count lines. Raises OSError if the file cannot be created, or exists already.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._file: BinaryIO = path.open("xb", buffering=0)
        except FileExistsError as error:
            raise FileExistsError(
                f"{path} exists already, and would be overwritten; name another, or remove it"
            ) from error
        except OSError as error:
            raise OSError(f"{path}: the file cannot be written ({error.strerror}); name another") from error
        self.num_written = 0
        self.num_lost = 0
        self._waiting = bytearray()
        self._num_waiting = 0
        self._is_closed = False
        self._has_failed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="quire-line-writer", daemon=True)
        self._thread.start()

    def put(self, line: bytes) -> None:
        """Queue a line, its end included; return at once."""
        with self._changed:
            if self._has_failed or self._is_closed:
                self.num_lost += 1
            elif len(self._waiting) + len(line) > _MOST_WAITING:
                self.num_lost += 1
                self._fail("the disk is too slow")
            else:
                self._waiting += line
                self._num_waiting += 1
                self._changed.notify()

    def close(self) -> None:
        """Write the queued lines, within some seconds if the disk does not answer. A file without lines is removed."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join(_CLOSE_SECONDS)
        if self._thread.is_alive():
            self._fail("the disk does not answer")
        elif self.num_lost:
            _LOGGER.warning("%s lacks %d lines, for the reason logged before", self._path, self.num_lost)
        if not self.num_written:
            self._path.unlink(missing_ok=True)

    def _run(self) -> None:
        is_last = False
        with self._file:
            while not is_last:
                with self._changed:
                    self._changed.wait_for(lambda: self._waiting or self._is_closed)
                    lines, self._waiting = self._waiting, bytearray()
                    num_lines, self._num_waiting = self._num_waiting, 0
                    is_last = self._is_closed
                self._write(lines, num_lines)

    def _write(self, lines: bytearray, num_lines: int) -> None:
        begin = self._file.tell()
        try:
            if not self._has_failed:
                self._write_all(lines)
                self.num_written += num_lines
                return
        except OSError as error:
            self._fail(error.strerror or str(error))
            with suppress(OSError):
                self._file.truncate(begin)  # never leave half a line
        with self._changed:
            self.num_lost += num_lines

    def _write_all(self, lines: bytearray) -> None:
        rest = memoryview(lines)
        while rest:
            rest = rest[self._file.write(rest) :]

    def _fail(self, reason: str) -> None:
        if not self._has_failed:
            self._has_failed = True
            _LOGGER.warning("%s: %s; no more is written to it, and requests go on", self._path, reason)


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

    def __exit__(self, *_error: object) -> None:
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

    def on_tokens(self, num_tokens: int, num_together: int, gaps: list[float], timestamp: float) -> None:
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
