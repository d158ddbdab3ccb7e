"""The bound on a process's log: whatever clients send, a disk does not fill, and nobody waits for the log.

Each place in the code that logs may write `MESSAGES_PER_SECOND`, after a burst of `BURST`. Others are counted, and the
count is logged: with a later message from there, after `_REPORT_SECONDS`, or when the process ends.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import TextIO

MESSAGES_PER_SECOND = 100.0
BURST = 1000.0
_REPORT_SECONDS = 10.0


class TokenBucket:
    """Holds up to `burst` tokens, and gains `rate` a second."""

    def __init__(self, rate: float, burst: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate = rate
        self._burst = burst
        self._clock = clock
        self._tokens = burst
        self._updated = clock()

    def take(self, amount: float = 1.0) -> bool:
        """Take this many tokens; return False, and take none, if there are fewer."""
        now = self._clock()
        self._tokens = min(self._burst, self._tokens + (now - self._updated) * self._rate)
        self._updated = now
        if self._tokens < amount:
            return False
        self._tokens -= amount
        return True


class _Place:
    """A place in the code that logs, with the number of its messages that were left out and the last of them."""

    __slots__ = ("bucket", "last", "num_left_out")

    def __init__(self, bucket: TokenBucket) -> None:
        self.bucket = bucket
        self.num_left_out = 0
        self.last: logging.LogRecord | None = None


class LimitedHandler(logging.StreamHandler[TextIO]):
    """Handler that writes to a stream within the bound. Child loggers share it, and so their places do."""

    def __init__(
        self,
        stream: TextIO | None = None,
        *,
        rate: float = MESSAGES_PER_SECOND,
        burst: float = BURST,
        report_seconds: float = _REPORT_SECONDS,
    ) -> None:
        """`stream`: None is stderr."""
        super().__init__(stream)
        self._rate = rate
        self._burst = burst
        self._report_seconds = report_seconds
        self._places: dict[tuple[str, int, int], _Place] = {}
        self._timer: threading.Timer | None = None

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record, or count it."""
        key = record.pathname, record.lineno, record.levelno
        place = self._places.get(key)
        if place is None:
            place = self._places[key] = _Place(TokenBucket(self._rate, self._burst))
        if place.bucket.take():
            self._report_place(place)
            super().emit(record)
            return
        place.num_left_out += 1
        place.last = record
        if self._timer is None:
            self._timer = threading.Timer(self._report_seconds, self._report)
            self._timer.daemon = True
            self._timer.start()

    def close(self) -> None:
        """Report what has been left out until now."""
        if self._timer is not None:
            self._timer.cancel()
        self._report()
        super().close()

    def _report(self) -> None:
        with self.lock or threading.Lock():
            self._timer = None
            for place in self._places.values():
                self._report_place(place)

    def _report_place(self, place: _Place) -> None:
        if (last := place.last) is None:
            return
        text = "%d more messages like this one were left out: %s"
        values = place.num_left_out, last.getMessage()
        place.num_left_out, place.last = 0, None
        super().emit(logging.LogRecord(last.name, last.levelno, last.pathname, last.lineno, text, values, None))
