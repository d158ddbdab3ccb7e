"""Transit times of requests and their tokens between a client and its engine."""

from __future__ import annotations

import statistics
from collections import defaultdict
from itertools import pairwise

from quire.frontend.evaluation.replay.record import RequestRecord
from quire.protocol.simulation import ClientTime, Rest


class ClientTimes:
    """Transit times, collected from requests that an otherwise idle engine has served."""

    def __init__(self) -> None:
        self._queued_alone: list[float] = []
        self._to_client: list[float] = []
        self._to_next: list[float] = []
        self._to_wake: list[float] = []
        self._least_to_wake = 0.0
        self._first_tokens: defaultdict[float, list[float]] = defaultdict(
            list
        )  # of equal requests, by the rest before them

    def add(self, record: RequestRecord) -> None:
        """Add a request that was alone: with another, it would wait for the end of a step, and for the client."""
        assert record.first_token is not None
        self._queued_alone.append(record.phases[0].begin - record.sent)
        self._to_client.append(record.first_token - _prefilled(record))

    def add_burst(self, records: list[RequestRecord]) -> None:
        """Add requests that were sent at once, in order.

        Requests that are in the queue when the engine starts the first one were sent while it woke.
        """
        first = records[0].phases[0]
        sent = [record.sent - records[0].sent for record in records]
        self._to_next += [after - before for before, after in pairwise(sent)]
        in_time = sum(record.phases[0].begin <= first.end for record in records)
        if in_time < len(records):
            self._to_wake.append((sent[in_time - 1] + sent[in_time]) / 2)
        else:
            self._least_to_wake = max(self._least_to_wake, sent[-1])

    def add_rested(self, records: list[RequestRecord], rest: float) -> None:
        """Add equal requests, each sent `rest` seconds after the end of the previous one; 0 is the baseline."""
        for record in records:
            assert record.first_token is not None
            self._first_tokens[rest].append(record.first_token - record.sent)

    @property
    def medians(self) -> ClientTime:
        """Median transit times. Raises ValueError if no request has ended."""
        if not self._queued_alone:
            raise ValueError("no request has ended in the given time; calibrate for longer")
        queued_alone = statistics.median(self._queued_alone)  # includes the time in which the engine woke
        to_wake = min(queued_alone, statistics.median(self._to_wake or [self._least_to_wake]))
        to_engine, to_client = queued_alone - to_wake, statistics.median(self._to_client)
        return ClientTime(
            to_engine=to_engine,
            to_client=to_client,
            to_next=statistics.median(self._to_next or [0.0]),
            to_wake=to_wake,
            rests=self._rests(to_engine + to_client),
        )

    def _rests(self, in_transit: float) -> tuple[Rest, ...]:
        """Return the delay after each rest, to which the time of an answer and the next request in transit adds."""
        medians = {rest: statistics.median(seconds) for rest, seconds in sorted(self._first_tokens.items())}
        if 0.0 not in medians:
            return ()  # no baseline
        least = medians[0.0]
        return tuple(Rest(in_transit + rest, max(0.0, seconds - least)) for rest, seconds in medians.items())


def _prefilled(record: RequestRecord) -> float:
    """Return the end of the step that computed the first token."""
    return next(phase.end for phase in record.phases if phase.kind == "prefill")
