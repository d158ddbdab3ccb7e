"""Transit times between a client and its engine, from the times of requests."""

from __future__ import annotations

import pytest

from quire.frontend.evaluation.calibration.client_times import ClientTimes
from quire.frontend.evaluation.replay.record import Phase, RequestRecord
from quire.protocol.simulation import Rest


def served(sent: float, queued: float, started: float, prefilled: float, arrived: float) -> RequestRecord:
    record = RequestRecord(0, sent, sent, 8, 4, first_token=arrived)
    record.phases = [Phase("queued", queued, started), Phase("prefill", started, prefilled)]
    return record


def test_requests_queued_when_the_first_one_starts_were_sent_while_the_engine_woke() -> None:
    times = ClientTimes()
    times.add(served(sent=1.0, queued=1.5, started=1.6, prefilled=2.0, arrived=2.25))
    # The fourth arrives after the step has begun; the third is queued, though scheduled in a later step.
    times.add_burst(
        [
            served(5.00, 5.30, 5.31, 6.0, 6.1),
            served(5.10, 5.30, 5.31, 6.0, 6.1),
            served(5.20, 5.30, 6.00, 7.0, 7.1),
            served(5.30, 6.00, 6.01, 7.0, 7.1),
        ]
    )
    found = times.medians
    assert found.to_wake == pytest.approx(0.25)  # between the third and the fourth
    assert found.to_next == pytest.approx(0.1)
    assert found.to_engine == pytest.approx(0.5 - 0.25)  # a lone request waits for the engine to wake
    assert found.to_client == pytest.approx(0.25)


def test_an_engine_with_all_requests_in_time_wakes_no_sooner_than_the_last_is_sent() -> None:
    times = ClientTimes()
    times.add(served(1.0, 1.5, 1.6, 2.0, 2.25))
    times.add_burst([served(5.0, 5.3, 5.31, 6.0, 6.1), served(5.1, 5.3, 5.31, 6.0, 6.1)])
    assert times.medians.to_wake == pytest.approx(0.1)


def test_an_engine_wakes_by_the_time_that_a_lone_request_is_queued() -> None:
    times = ClientTimes()
    times.add(served(1.0, 1.1, 1.2, 2.0, 2.25))
    times.add_burst([served(5.0, 5.5, 5.6, 6.0, 6.1), served(5.4, 5.5, 5.6, 6.0, 6.1)])  # this time it took longer
    assert times.medians.to_wake == pytest.approx(0.1)
    assert times.medians.to_engine == 0


def test_a_token_after_a_rest_is_later() -> None:
    times = ClientTimes()
    times.add(served(1.0, 1.5, 1.6, 2.0, 2.25))  # 0.5 s and 0.25 s in transit, in which the engine rests too
    for rest, first_tokens in {0.5: (3.0, 2.0, 2.5), 0.125: (1.75, 1.75, 1.75)}.items():
        times.add_rested([served(10.0, 10.1, 10.2, 10.5, 10.0 + seconds) for seconds in first_tokens], rest)
    assert not times.medians.rests  # without a baseline
    times.add_rested([served(10.0, 10.1, 10.2, 10.5, 10.0 + seconds) for seconds in (2.0, 1.5, 9.0)], 0.0)
    assert times.medians.rests == (Rest(0.75, 0.0), Rest(0.875, 0.0), Rest(1.25, 0.5))  # none comes earlier


def test_without_a_request_there_are_no_times() -> None:
    with pytest.raises(ValueError, match="no request has ended"):
        _ = ClientTimes().medians
