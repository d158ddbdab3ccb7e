"""Records of streams that arrive in pieces of any size."""

from __future__ import annotations

import pytest
from rude_server import DONE, event

from quire.frontend.evaluation.replay.http_answer import StreamedResponse
from quire.frontend.evaluation.replay.record import Outcome, RequestRecord, RunClock


def answered(stream: bytes, size: int) -> RequestRecord:
    """Return the record of a request whose answer arrives in pieces of that size."""
    record = RequestRecord(0, 0.0, 0.0, prompt_tokens=3, wanted_output_tokens=7)
    answer = StreamedResponse(record, RunClock())
    answer.on_status(200)
    for begin in range(0, len(stream), size):
        answer.on_body(stream[begin : begin + size])
    answer.end()
    return record


@pytest.mark.parametrize("size", [1, 50, 1 << 20])
def test_tokens_that_come_with_the_usage_are_counted_once(size: int) -> None:
    usage = {"prompt_tokens": 11, "completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": 5}}
    record = answered(event("a") + event("b", finish_reason="length") + event(usage=usage) + DONE, size)
    assert record.outcome is Outcome.COMPLETED
    assert (record.prompt_tokens, record.output_tokens, record.cached_tokens) == (11, 7, 5)


@pytest.mark.parametrize("size", [1, 1 << 20])
def test_a_usage_in_each_chunk_is_of_all_tokens_so_far(size: int) -> None:
    chunks = [event("a", usage={"completion_tokens": count}) for count in (2, 4, 6)]
    record = answered(b"".join(chunks) + event("", finish_reason="stop") + DONE, size)
    assert record.output_tokens == 6
    assert record.num_together == 5 - len(record.gaps)


def test_chunks_that_are_read_at_once_came_together() -> None:
    record = answered(event("a") + event("b") + event("c", finish_reason="length") + DONE, 1 << 20)
    assert (record.output_tokens, record.num_together, record.gaps.tolist()) == (3, 2, [])


@pytest.mark.parametrize("body", [b'{"error": "\xca"}', b'{"error": ' + b"[" * 100_000])
def test_an_event_that_is_not_json_is_an_error_that_shows_it(body: bytes) -> None:
    with pytest.raises(ValueError, match="an event of the stream is not a chunk"):
        answered(b"data: " + body + b"\n\n", 1 << 20)


@pytest.mark.parametrize("body", [b'{"error": "\xca"}', b"[" * 100_000])
def test_an_error_that_is_not_json_is_shown_as_it_is(body: bytes) -> None:
    record = RequestRecord(0, 0.0, 0.0, prompt_tokens=3, wanted_output_tokens=7)
    answer = StreamedResponse(record, RunClock())
    answer.on_status(500)
    answer.on_body(body)
    answer.end()
    assert record.outcome is Outcome.ERRORED
    assert record.error is not None
    assert body[:5].decode() in record.error
