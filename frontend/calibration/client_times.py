"""How long requests and their tokens are under way between a client and its engine."""

from __future__ import annotations

import statistics
from itertools import pairwise

from quire.frontend.replay.record import RequestRecord
from quire.protocol.simulation import ClientTime


class ClientTimes:
    """Collects them from requests that an engine with nothing else to do has served."""

    def __init__(self) -> None:
        self._to_engine: list[float] = []
        self._to_client: list[float] = []
        self._to_next: list[float] = []
        self._to_wake: list[float] = []

    def add(self, record: RequestRecord) -> None:
        """One that was alone: another would have it wait for the end of its step, and for the client."""
        assert record.first_token is not None
        self._to_engine.append(record.phases[0].begin - record.sent)
        self._to_client.append(record.first_token - _prefilled(record))

    def add_burst(self, records: list[RequestRecord]) -> None:
        """Those that were sent at once, in order, and would all fit into one step.

        Who is not in the first step was sent too late for it.
        """
        sent = [record.sent - records[0].sent for record in records]
        self._to_next += [after - before for before, after in pairwise(sent)]
        in_first = sum(_prefilled(record) == _prefilled(records[0]) for record in records)
        if in_first < len(records):
            self._to_wake.append((sent[in_first - 1] + sent[in_first]) / 2)

    @property
    def medians(self) -> ClientTime:
        """Raises ValueError if not one request has ended."""
        if not self._to_engine:
            raise ValueError("no request has ended in the time that was given; calibrate for longer")
        times = self._to_engine, self._to_client, self._to_next or [0.0], self._to_wake or [0.0]
        return ClientTime(*map(statistics.median, times))


def _prefilled(record: RequestRecord) -> float:
    """The end of the step that gave the first token."""
    return next(phase.end for phase in record.phases if phase.kind == "prefill")
