"""The bound on the rate of log lines."""

from __future__ import annotations

import io
import logging
import threading
from collections.abc import Iterator

import pytest
from patience import PATIENCE

from quire.protocol.log_limit import LimitedHandler, TokenBucket


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    logger = logging.getLogger("quire.test_log_limit")
    logger.propagate = False
    yield logger
    for handler in logger.handlers[:]:
        logger.removeHandler(handler)
        handler.close()


def test_a_bucket_gains_tokens_up_to_its_burst() -> None:
    now = 0.0
    bucket = TokenBucket(2.0, 3.0, lambda: now)
    assert [bucket.take() for _ in range(4)] == [True, True, True, False]
    now = 0.5
    assert [bucket.take() for _ in range(2)] == [True, False]
    now = 100.0
    assert [bucket.take() for _ in range(4)] == [True, True, True, False]


def test_a_flood_from_one_place_is_counted_and_others_are_written(logger: logging.Logger) -> None:
    stream = io.StringIO()
    handler = LimitedHandler(stream, rate=1e-9, burst=5)
    logger.addHandler(handler)
    for number in range(100):
        logger.warning("rubbish %d", number)
    logger.warning("something else")
    written = [f"rubbish {number}" for number in range(5)]
    assert stream.getvalue().splitlines() == [*written, "something else"]
    handler.close()
    assert stream.getvalue().splitlines()[-1] == "95 more messages like this one were left out: rubbish 99"


def test_what_was_left_out_is_reported_after_a_while(logger: logging.Logger) -> None:
    class Stream(io.StringIO):
        reported = threading.Event()

        def write(self, text: str, /) -> int:
            if "left out" in text:
                self.reported.set()
            return super().write(text)

    stream = Stream()
    logger.addHandler(LimitedHandler(stream, rate=1e-9, burst=1, report_seconds=0.01))
    for _ in range(3):
        logger.error("rubbish")
    assert stream.reported.wait(PATIENCE)
    assert stream.getvalue().splitlines()[0] == "rubbish"
