"""Phases from an engine's events."""

from __future__ import annotations

import pytest

from quire.frontend.evaluation.replay.record import Phase, PhaseTrack, RequestRecord, RunClock
from quire.protocol.messages import EngineCoreEvent, EngineCoreOutput, EventType

EVENTS = [
    (EventType.QUEUED, 1.0),
    (EventType.SCHEDULED, 2.0),
    (EventType.FIRST_TOKEN, 4.0),
    (EventType.PREEMPTED, 7.0),
    (EventType.SCHEDULED, 8.0),
]


def tracked(offset: float, now: float) -> RequestRecord:
    """Return the record of a request sent at 0.5 to an engine whose clock is `offset` ahead; events arrive at `now`."""
    clock, record = RunClock(), RequestRecord(0, 0.5, 0.5, 8, 8)
    clock.begin -= now
    track = PhaseTrack(record, clock)
    start = clock.begin + offset
    for kind, at in EVENTS:
        track.note(EngineCoreOutput("0", events=[EngineCoreEvent(kind, start + at)]), start + at)
    assert track.is_catching_up
    track.note(EngineCoreOutput("0", [5]), start + 9.0)
    end = EngineCoreEvent(EventType.FINISHED, start + 10.0)
    track.note(EngineCoreOutput("0", [6], events=[end]), start + 10.0)
    return record


@pytest.mark.parametrize(("offset", "shift"), [(0.0, 0.0), (1e6, -0.5), (-1e6, -0.5)])
def test_phases_follow_one_another_and_count_from_the_sending_if_the_clock_is_not_ours(
    offset: float, shift: float
) -> None:
    record = tracked(offset, now=20.0)
    times = [1.0, 2.0, 4.0, 7.0, 8.0, 9.0, 10.0]
    kinds = ["queued", "prefill", "decode", "preempted", "prefill", "decode"]
    assert [phase.kind for phase in record.phases] == kinds
    begins = [phase.begin for phase in record.phases]
    assert begins == pytest.approx([time + shift for time in times[:-1]], abs=1e-6)
    assert [phase.end for phase in record.phases] == pytest.approx([time + shift for time in times[1:]], abs=1e-6)
    assert record.num_preemptions == 1


def test_a_request_that_is_left_ends_its_phase() -> None:
    clock, record = RunClock(), RequestRecord(0, 0.0, 0.0, 8, 8)
    track = PhaseTrack(record, clock)
    track.note(EngineCoreOutput("0", events=[EngineCoreEvent(EventType.QUEUED, clock.begin)]), clock.begin)
    track.end(3.0)
    track.end(4.0)
    assert record.phases == [Phase("queued", 0.0, 3.0)]
