"""Traces of steps as slices and counters."""

from __future__ import annotations

import io

import msgspec
import pytest
from chrome_traces import ENGINE, begin, end, write

from quire.frontend.metrics.chrome_trace import ChromeTrace
from quire.protocol.messages import EventType, FinishReason, RequestEvent, SchedulerStats, SequenceTrace, StepTrace


def event(kind: EventType, time: float, *, number: int = 1, cached: int = 0) -> RequestEvent:
    reason = FinishReason.LENGTH if kind is EventType.FINISHED else None
    return RequestEvent(number, f"r{number}", kind, time, 8, cached, reason)


def step(
    number: int, begin: float, computed: list[tuple[int, int, int]], *events: RequestEvent, decodes: int = 0
) -> StepTrace:
    """A step that takes 1 s to schedule, 6 s to execute and 1 s to update; `computed`: request, start and count."""
    tokens = sum(count for _, _, count in computed) - decodes
    stats = SchedulerStats(number, len(computed), 0, tokens, decodes)
    stats.schedule_seconds, stats.execute_seconds, stats.update_seconds = 1.0, 6.0, 1.0
    return StepTrace(begin, stats, [SequenceTrace(n, f"r{n}", start, count) for n, start, count in computed], [*events])


LIFE = [
    step(1, 10, [(1, 4, 4)], event(EventType.QUEUED, 5), event(EventType.SCHEDULED, 10.5, cached=4)),
    step(2, 20, [(1, 8, 1)], decodes=1),
    step(3, 30, [(1, 9, 1)], decodes=1),
    StepTrace(40.0, SchedulerStats(4), [], [event(EventType.PREEMPTED, 40)]),
    step(5, 50, [(1, 4, 6)], event(EventType.SCHEDULED, 50.5, cached=4)),
    step(6, 60, [(1, 10, 1)], event(EventType.FINISHED, 67), decodes=1),
]


def test_the_life_of_a_request() -> None:
    written = write(LIFE)
    told = [(each["name"], begin(each) / 1e9, end(each) / 1e9, each["args"]) for each in written.requests[1]]
    assert told == [
        ("queued", 5, 10.5, {"prompt_tokens": 8}),
        ("prefill", 11, 17, {"tokens": 4, "start": 4, "step": 1, "cached_tokens": 4}),
        ("decode", 21, 37, {"tokens": 2}),
        ("preempted", 40, 50.5, {"prompt_tokens": 8}),
        ("prefill", 51, 57, {"tokens": 6, "start": 4, "step": 5, "cached_tokens": 4}),
        ("decode", 61, 67, {"tokens": 1}),
    ]
    assert written.ends(1) == ["finished: length"]
    names = [each["args"]["name"] for each in written.events if each["name"] == "thread_name"]
    assert names == ["steps", "request 1 (id r1)"]


def test_a_step_and_its_counters() -> None:
    stats = SchedulerStats(
        7, 2, 3, 30, 1, 4, 5, pages_free=6, pages_cached=7, pages_held=8, schedule_seconds=1.0, execute_seconds=2.0,
        draft_tokens=3, accepted_tokens=2,
    )  # fmt: skip
    written = write([StepTrace(10.0, stats, [SequenceTrace(1, "a", 9, 1), SequenceTrace(2, "b", 0, 30)])])
    (whole,) = written.steps
    assert whole["args"] == {
        "step": 7, "running": 2, "waiting": 3, "prefill_tokens": 30, "decode_tokens": 1, "cached_tokens": 5,
        "draft_tokens": 3, "accepted_tokens": 2,
    }  # fmt: skip
    counters = {each["name"]: each["args"] for each in written.events if each["ph"] == "C"}
    assert counters == {
        "pages": {"free": 6, "cached": 7, "held": 8},
        "requests": {"running": 2, "waiting": 3},
        "tokens per step": {"prefill": 30, "decode": 1},
    }


def test_open_slices_are_closed_at_the_end() -> None:
    late = event(EventType.QUEUED, 12, number=2)
    written = write([*LIFE[:2], StepTrace(25.0, events=[late]), step(3, 30, [(1, 9, 1)], decodes=1)])
    assert written.names(1) == ["queued", "prefill", "decode"]
    assert [(each["name"], end(each) / 1e9) for each in written.requests[2]] == [("queued", 38)]


def test_a_recording_that_starts_in_the_middle() -> None:
    written = write([step(3, 30, [(1, 9, 1)], event(EventType.QUEUED, 2, number=2), decodes=1), *LIFE[3:]])
    assert written.names(1) == ["decode", "preempted", "prefill", "decode", "finished: length"]
    assert begin(written.requests[2][0]) == 2e9


def test_a_new_subscription_gets_waiting_requests_again() -> None:
    again = StepTrace(8.0, events=[event(EventType.QUEUED, 5)])
    assert write([again, again, *LIFE]).names(1) == write(LIFE).names(1)


def test_no_slice_covers_lost_traces() -> None:
    lost = msgspec.structs.replace(LIFE[5], dropped=2)
    written = write([*LIFE[:3], lost])
    assert written.names(1) == ["queued", "prefill", "decode", "decode", "finished: length"]
    assert [end(each) / 1e9 for each in written.requests[1][2:]] == [37, 67]
    marks = [each["name"] for each in written.events if each["ph"] == "i" and each["pid"] == ENGINE]
    assert marks == ["2 traces lost"]


def test_times_of_a_host_with_a_long_uptime_do_not_overlap() -> None:
    far = 1e7 / 3  # s, some weeks
    fine = 1e-7 / 3
    traces = [
        StepTrace(
            far + index * 4 * fine,
            SchedulerStats(index, prefill_tokens=1, schedule_seconds=fine, execute_seconds=fine, update_seconds=fine),
            [SequenceTrace(1, "r", index, 1)],
        )
        for index in range(300)
    ]
    assert len(write(traces).requests[1]) == 300


def test_a_file_that_is_full_is_an_error_and_not_complete() -> None:
    class Full(io.BytesIO):
        def write(self, data: object) -> int:
            if self.tell() > 500:
                raise OSError(28, "No space left on device")
            return super().write(data)  # type: ignore[arg-type]

    chrome = ChromeTrace(Full())
    with pytest.raises(OSError, match="No space"), chrome:
        chrome.add(LIFE[0])
    assert not chrome.is_complete
