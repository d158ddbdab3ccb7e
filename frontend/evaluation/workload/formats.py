"""Formats of traces: Mooncake's JSON lines, CSV tables, and their detection from the first line."""

from __future__ import annotations

from datetime import UTC, datetime
from functools import lru_cache
from typing import Annotated, Any, Literal, get_args

import msgspec

from quire.frontend.evaluation.workload.blocks import FreshBlocks, blocks_for
from quire.frontend.evaluation.workload.request import BLOCK_TOKENS, WorkloadRequest
from quire.frontend.evaluation.workload.rows import (
    CsvColumns,
    RowParser,
    check_length,
    check_seconds,
    header_names,
    shown,
    whole_number,
)
from quire.frontend.sampling import validate
from quire.protocol.messages import SamplingParams

FIELDS = "timestamp (ms), input_length, output_length, hash_ids"

_BlockName = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
_PARAMS = frozenset(SamplingParams.__struct_fields__)


class _MooncakeRow(msgspec.Struct):
    """A row: times in milliseconds, lengths in tokens. `quire serve --record` adds `block_tokens` and `params`."""

    input_length: int
    output_length: int
    timestamp: float | None = None
    hash_ids: tuple[_BlockName, ...] | None = None
    block_tokens: int = BLOCK_TOKENS
    delay: float | None = None
    session_id: str | int | None = None
    text_input: str | None = None
    messages: list[dict[str, Any]] | None = None
    params: msgspec.Raw = msgspec.Raw()


_DECODER = msgspec.json.Decoder(_MooncakeRow)


class MooncakeParser:
    """Parser of Mooncake's rows. Prompts share the blocks that `hash_ids` name; one without them shares nothing.

    A row of a session that has a delay may lack the time: it takes that of the row above, and then waits for the
    session's previous request.
    """

    def __init__(self) -> None:
        self._blocks = FreshBlocks(-1, -1)  # a trace's own names are not negative

    def parse(self, line: bytes, previous: float | None) -> WorkloadRequest:
        """See `RowParser`."""
        row = _decoded(line)
        prompt_tokens, output_tokens = row.input_length, row.output_length
        check_length("input_length", prompt_tokens)
        check_length("output_length", output_tokens)
        if row.block_tokens != BLOCK_TOKENS:
            check_length("block_tokens", row.block_tokens)
        if row.hash_ids is None:  # nothing is shared, so that the size of its blocks means nothing; 1 would take a GB
            block_tokens, blocks = BLOCK_TOKENS, self._blocks.take(blocks_for(prompt_tokens))
        else:
            block_tokens, blocks = row.block_tokens, row.hash_ids
        if len(blocks) != (count := blocks_for(prompt_tokens, block_tokens)):
            raise ValueError(
                f"{len(blocks)} hash_ids for input_length {prompt_tokens}; there must be one for each "
                f"{block_tokens} tokens, {count}"
            )
        return WorkloadRequest(
            _arrival(row, previous),
            prompt_tokens,
            output_tokens,
            blocks,
            block_tokens,
            None if row.session_id is None else str(row.session_id),
            _delay(row),
            row.text_input,
            row.messages,
            _params(bytes(row.params)),
        )


def _decoded(line: bytes) -> _MooncakeRow:
    try:
        return _DECODER.decode(line)
    except UnicodeDecodeError as error:
        raise ValueError(f"{error.reason} in UTF-8; a row is a JSON object in UTF-8 with {FIELDS}") from None
    except msgspec.DecodeError as error:
        raise ValueError(f"{error}; a row is a JSON object with {FIELDS}") from None
    except RecursionError:
        raise ValueError(f"JSON is nested too deep; a row is a JSON object with {FIELDS}") from None


def _arrival(row: _MooncakeRow, previous: float | None) -> float:
    if row.timestamp is not None:
        check_seconds("timestamp", row.timestamp)
        return row.timestamp / 1000
    if row.session_id is None or row.delay is None:
        raise ValueError("there is no timestamp; give one (ms), or session_id and delay (ms)")
    return previous or 0.0


def _delay(row: _MooncakeRow) -> float:
    if row.delay is None:
        return 0.0
    check_seconds("delay", row.delay)
    return row.delay / 1000


@lru_cache(maxsize=256)  # validation takes ten times as long as the rest of a row
def _params(text: bytes) -> dict[str, Any] | None:
    """Return the validated fields of `SamplingParams`, None where the row has none. Raises ValueError."""
    given = msgspec.json.decode(text, type=dict[str, Any] | None) if text else None
    if given is None:
        return None
    if unknown := sorted(set(given) - _PARAMS):
        raise ValueError(f"params has {shown(unknown)}; it may have the fields of SamplingParams")
    if isinstance(bias := given.get("logit_bias"), dict):
        given = {**given, "logit_bias": {int(token): value for token, value in bias.items()}}  # JSON's keys are strings
    validate(SamplingParams(**given))
    return given


class AzureParser:
    """Parser of Azure's LLM inference traces of 2023 and 2024: a date and time, and two lengths in tokens."""

    COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")

    def __init__(self, header: bytes) -> None:
        self._columns = CsvColumns(header, self.COLUMNS)
        self._blocks = FreshBlocks()

    def parse(self, line: bytes, _previous: float | None) -> WorkloadRequest:
        """See `RowParser`."""
        cells = self._columns.split(line)
        time, prompt, output = self._columns.places
        prompt_tokens = whole_number("ContextTokens", cells[prompt])
        output_tokens = whole_number("GeneratedTokens", cells[output])
        check_length("ContextTokens", prompt_tokens)
        check_length("GeneratedTokens", output_tokens)
        blocks = self._blocks.take(blocks_for(prompt_tokens))
        return WorkloadRequest(_azure_seconds(cells[time]), prompt_tokens, output_tokens, blocks)


class BurstGptParser:
    """Parser of BurstGPT's traces: a time in seconds, two lengths in tokens and, in newer files, the session.

    A row without response tokens is a request that failed when it was recorded. Its length is unknown, so it is bad.
    """

    COLUMNS = ("Timestamp", "Request tokens", "Response tokens")

    def __init__(self, header: bytes) -> None:
        self._columns = CsvColumns(header, self.COLUMNS, ("Session ID",))
        self._blocks = FreshBlocks()

    def parse(self, line: bytes, _previous: float | None) -> WorkloadRequest:
        """See `RowParser`."""
        cells = self._columns.split(line)
        time, prompt, output = self._columns.places
        (session,) = self._columns.optional
        prompt_tokens = whole_number("Request tokens", cells[prompt])
        output_tokens = whole_number("Response tokens", cells[output])
        check_length("Request tokens", prompt_tokens)
        if output_tokens == 0:
            raise ValueError("Response tokens is 0, a request that failed when it was recorded; it must be at least 1")
        check_length("Response tokens", output_tokens)
        blocks = self._blocks.take(blocks_for(prompt_tokens))
        name = None if session is None else cells[session].strip() or None
        return WorkloadRequest(_burstgpt_seconds(cells[time]), prompt_tokens, output_tokens, blocks, session=name)


def _azure_seconds(text: str) -> float:
    """Return seconds since 1970. A time without a zone is taken as UTC, so that no hour repeats or is missing."""
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(
            f"TIMESTAMP is {shown(text)}; it must be a date and time such as 2023-11-16 18:15:46.6805900"
        ) from None
    return (time if time.tzinfo is not None else time.replace(tzinfo=UTC)).timestamp()


def _burstgpt_seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        raise ValueError(f"Timestamp is {shown(text)}; it must be a number of seconds") from None
    check_seconds("Timestamp", seconds)
    return seconds


Format = Literal["mooncake", "azure", "burstgpt"]
FORMATS: tuple[Format, ...] = get_args(Format)

_TABLES: dict[Format, type[AzureParser | BurstGptParser]] = {"azure": AzureParser, "burstgpt": BurstGptParser}
_COMPRESSED = {
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\xfd7zXZ": "xz",
    b"BZh": "bzip2",
    b"PK\x03\x04": "zip",
}
_KNOWN = (
    f"JSON lines with {FIELDS}; or a CSV header with "
    f"{' or '.join(', '.join(table.COLUMNS) for table in _TABLES.values())}"
)


def has_header(name: Format) -> bool:
    """Return True if the first line of this format is a header."""
    return name in _TABLES


def parser_for(name: Format, first: bytes) -> RowParser:
    """Return a parser for the file with this first line. Raises ValueError if columns are missing."""
    return _TABLES[name](first) if name in _TABLES else MooncakeParser()


def detect(first: bytes) -> Format:
    """Return the format of the file with this first line, even if some columns are missing. Raises ValueError."""
    for magic, compression in _COMPRESSED.items():
        if first.startswith(magic):
            raise ValueError(f"the file is compressed with {compression}; decompress it first")
    if first.lstrip().startswith(b"{"):
        return "mooncake"
    found = {name: _num_found(table.COLUMNS, first) for name, table in _TABLES.items()}
    best = max(found, key=lambda name: found[name])
    if not found[best]:
        raise ValueError(f"the first line is {shown(first)}, of no known format; it must be {_KNOWN}")
    return best


def _num_found(columns: tuple[str, ...], header: bytes) -> int:
    try:
        return len(set(columns) & set(header_names(header)))
    except ValueError:
        return 0
