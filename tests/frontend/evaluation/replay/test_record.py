"""Increments of a request: which tokens came together."""

from __future__ import annotations

import pytest

from quire.frontend.evaluation.replay.record import TOGETHER, RequestRecord


def test_messages_that_are_hardly_apart_are_one_increment() -> None:
    """A reader that wakes late finds several messages, each with a token; they are not a stream of quick tokens."""
    record = RequestRecord(0, 1.0, 1.0, prompt_tokens=3, wanted_output_tokens=9)
    for tokens, now in ((1, 2.0), (1, 2.5), (1, 2.5 + 0.1 * TOGETHER), (2, 2.5 + 0.9 * TOGETHER), (1, 2.5 + TOGETHER)):
        record.grow(tokens, now)
    record.grow(3, 4.0)
    assert record.output_tokens == 9
    assert record.gaps.tolist() == pytest.approx([0.5, TOGETHER, 1.5 - TOGETHER])
    assert record.num_together == 8 - 3
    assert (record.first_token, record.last_token) == (2.0, 4.0)
    assert record.ttft == 1.0
