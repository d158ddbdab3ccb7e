"""The memory of the server's process, as measured by the test."""

from __future__ import annotations

import pytest

from quire.frontend.http.errors import ApiError
from quire.frontend.http.transport.memory import MemoryCeiling


class Measured:
    """A process whose memory, and the part of it that can be given back, the test sets."""

    def __init__(self) -> None:
        self.now = 0.0
        self.resident = 50
        self.free = 0
        self.ceiling = MemoryCeiling(100, read=lambda: self.resident, trim=self.trim, clock=lambda: self.now)

    def trim(self) -> None:
        self.resident -= self.free
        self.free = 0

    def after(self, seconds: float, resident: int, free: int = 0) -> None:
        self.now += seconds
        self.resident, self.free = resident, free


def test_requests_are_rejected_while_others_hold_the_memory() -> None:
    measured = Measured()
    with measured.ceiling.admit():
        measured.after(1.0, 101)
        with (
            pytest.raises(ApiError, match="takes 101 bytes of memory, and may take 100") as caught,
            measured.ceiling.admit(),
        ):
            pass
        assert caught.value.status == 503
        measured.ceiling.check()  # the one that is open goes on
        measured.after(1.0, 99)
        with measured.ceiling.admit():
            pass


def test_one_request_is_served_whatever_is_measured() -> None:
    measured = Measured()
    measured.after(1.0, 500)
    for _ in range(2):
        with measured.ceiling.admit():
            measured.ceiling.check()


def test_memory_is_given_back_first() -> None:
    measured = Measured()
    with measured.ceiling.admit():
        measured.after(1.0, 120, free=40)
        with measured.ceiling.admit():
            assert measured.resident == 80


def test_a_body_that_grows_meets_the_limit() -> None:
    measured = Measured()
    with measured.ceiling.admit(), measured.ceiling.admit():
        measured.ceiling.check()
        measured.after(1.0, 101)
        with pytest.raises(ApiError):
            measured.ceiling.check()
