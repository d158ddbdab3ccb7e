"""Mooncake's JSON lines (https://github.com/kvcache-ai/Mooncake), with the fields that other tools and Quire add."""

from __future__ import annotations

from functools import lru_cache
from typing import Annotated, Any

import msgspec

from quire.frontend.evaluation.workload.blocks import FreshBlocks, blocks_for
from quire.frontend.evaluation.workload.request import BLOCK_TOKENS, WorkloadRequest
from quire.frontend.evaluation.workload.rows import check_length, check_seconds, shown
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
        count = blocks_for(prompt_tokens, row.block_tokens)
        blocks = self._blocks.take(count) if row.hash_ids is None else row.hash_ids
        if len(blocks) != count:
            raise ValueError(
                f"{len(blocks)} hash_ids for input_length {prompt_tokens}; there must be one for each "
                f"{row.block_tokens} tokens, {count}"
            )
        return WorkloadRequest(
            _arrival(row, previous),
            prompt_tokens,
            output_tokens,
            blocks,
            row.block_tokens,
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
