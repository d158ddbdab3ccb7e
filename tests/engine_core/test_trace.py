"""Traces of the steps, against the steps that the executor was asked to compute."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from paged_executor import Engine

from quire.engine_core.transport import outbox
from quire.engine_core.transport.outbox import TraceQueue, weigh_trace
from quire.protocol.messages import (
    Abort,
    EventType,
    FinishReason,
    Goodbye,
    RequestEvent,
    SequenceTrace,
    StepTrace,
    UtilityCall,
    UtilityResult,
)

WATCHER = b"watcher"
PROMPT = list(range(100, 122))  # 5 pages of 4, and 2 tokens


def call(engine: Engine, method: str, client_id: bytes = WATCHER) -> None:
    engine.core.receive(client_id, UtilityCall(1, method))


def traces(engine: Engine, client_id: bytes = WATCHER) -> list[StepTrace]:
    return [message for message in engine.sent.get(client_id, []) if isinstance(message, StepTrace)]


def kinds(engine: Engine, number: int) -> list[EventType]:
    return [event.type for trace in traces(engine) for event in trace.events if event.number == number]


def test_a_trace_has_the_tokens_of_every_step() -> None:
    engine = Engine(num_pages=20)
    engine.expect_no_output()
    call(engine, "trace_start")
    for index in range(3):
        engine.add(str(index), [index] * 12, max_tokens=24)
    engine.finish()
    call(engine, "trace_stop")
    steps = [trace for trace in traces(engine) if trace.stats is not None]
    received = [
        {sequence.request_id: (sequence.start, sequence.count) for sequence in step.sequences} for step in steps
    ]
    assert received == engine.executor.steps
    for step in steps:
        assert step.stats is not None
        counts = [sequence.count for sequence in step.sequences]
        assert counts[: step.stats.decode_tokens] == [1] * step.stats.decode_tokens
        assert sum(counts) == step.stats.prefill_tokens + step.stats.decode_tokens
    assert engine.core.stats.preemptions > 0
    for number in (1, 2, 3):
        seen = kinds(engine, number)
        pairs = [EventType.PREEMPTED, EventType.SCHEDULED] * ((len(seen) - 3) // 2)
        assert seen == [EventType.QUEUED, EventType.SCHEDULED, *pairs, EventType.FINISHED]
    assert [trace.last for trace in traces(engine)] == [False] * (len(traces(engine)) - 1) + [True]


def test_events_have_the_cached_tokens_and_the_finish_reason() -> None:
    engine = Engine()
    call(engine, "trace_start")
    for name in "ab":
        engine.add(name, PROMPT, max_tokens=2)
        engine.finish()
    events = [event for trace in traces(engine) for event in trace.events]
    assert events[3:] == [
        RequestEvent(2, "b", EventType.QUEUED, 0.0, 22),
        RequestEvent(2, "b", EventType.SCHEDULED, 0.0, 22, 20),
        RequestEvent(2, "b", EventType.FINISHED, 0.0, 22, 0, FinishReason.LENGTH),
    ]


def test_a_start_and_a_preemption_between_two_steps_are_both_traced() -> None:
    """A successor starts, and then two others need a page each, of which one is left."""
    engine = Engine(num_pages=7, max_num_seqs=3)
    engine.expect_no_output()
    call(engine, "trace_start")
    for index in range(2):
        engine.add(f"other {index}", [index] * 8, max_tokens=4)
    engine.add("first", PROMPT[:6], max_tokens=1)
    engine.add("successor", PROMPT[:6], max_tokens=2, shares_prompt_with="first")
    engine.step()
    assert engine.executor.num_forks == 1
    engine.step()
    assert engine.core.stats.preemptions == 1
    engine.finish()
    assert kinds(engine, 4) == [
        EventType.QUEUED,
        EventType.SCHEDULED,
        EventType.PREEMPTED,
        EventType.SCHEDULED,
        EventType.FINISHED,
    ]


def test_only_subscribers_get_traces() -> None:
    engine = Engine()
    engine.add("a", PROMPT, max_tokens=9)
    engine.step()
    assert traces(engine) == traces(engine, b"client") == []
    call(engine, "trace_start")
    call(engine, "trace_start", b"second")
    engine.step()
    call(engine, "trace_stop")
    engine.step()
    engine.core.receive(b"second", Goodbye())
    engine.finish()
    assert [trace.stats and trace.stats.step for trace in traces(engine)] == [None, 2, None]
    assert [trace.stats and trace.stats.step for trace in traces(engine, b"second")] == [None, 2, 3]
    assert traces(engine, b"client") == []


def test_a_late_subscriber_gets_the_waiting_requests() -> None:
    engine = Engine(max_num_seqs=1)
    engine.add("a", PROMPT, max_tokens=9)
    engine.now = 3.0
    engine.add("b", [1, 2], max_tokens=9)
    engine.step()
    engine.now = 5.0
    call(engine, "trace_start")
    assert traces(engine) == [StepTrace(5.0, events=[RequestEvent(2, "b", EventType.QUEUED, 3.0, 2)])]


def test_ends_without_a_step_are_traced_too() -> None:
    engine = Engine()
    call(engine, "trace_start")
    engine.add("a", PROMPT, max_tokens=9)
    engine.core.receive(b"client", Abort(["a"]))
    engine.step()
    assert kinds(engine, 1) == [EventType.QUEUED, EventType.FINISHED]
    engine.add("b", PROMPT, max_tokens=9)
    engine.core.end_all("the engine failed")
    end = traces(engine)[-1].events[-1]
    assert (end.number, end.finish_reason) == (2, FinishReason.ERROR)


def test_the_calls_are_answered() -> None:
    engine = Engine()
    for method in ("trace_stop", "trace_start", "trace_start", "trace_stop", "trace_stop"):
        call(engine, method)
    assert [m for m in engine.sent[WATCHER] if isinstance(m, UtilityResult)] == [UtilityResult(1)] * 5
    assert [trace.last for trace in traces(engine)] == [True, False, False, True, True]


@given(st.lists(st.integers(0, 40), max_size=60), st.integers(0, 60))
def test_a_queue_of_traces_keeps_the_latest_and_counts_the_others(sizes: list[int], taken_early: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(outbox, "_MAX_TRACE_VALUES", 1000)
        queue = TraceQueue()
        put = [StepTrace(float(i), sequences=[SequenceTrace(1, "r", 0, 1)] * n) for i, n in enumerate(sizes)]
        dropped = sum(queue.put(trace) for trace in put[:taken_early])
        taken = [queue.take()] if queue else []
        dropped += sum(queue.put(trace) for trace in put[taken_early:])
        while queue:
            taken.append(queue.take())
    assert sum(trace.dropped for trace in taken) == dropped
    assert [trace.begin for trace in taken[1:]] == [float(i) for i in range(len(put) - len(taken) + 1, len(put))]
    assert len(taken) + dropped == len(put)
    place = -1
    for trace in taken:
        place += 1 + trace.dropped
        assert trace.begin == place
    assert sum(weigh_trace(trace) for trace in taken[1:]) <= 1000 or len(taken) <= 2
