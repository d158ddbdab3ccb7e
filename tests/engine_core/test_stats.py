"""The statistics of a step against what the executor was asked to compute, and the times of events."""

from __future__ import annotations

from typing import Any

from paged_executor import Engine, PagedStepResult

from quire.kernels.step import StepInput
from quire.protocol.messages import EventType, SchedulerStats

PROMPT = list(range(100, 122))  # 5 pages of 4, and 2 tokens


class Timed(Engine):
    """An engine in which scheduling takes 1 s, computing 10 s, and closing a sequence (in `update`) 100 s."""

    def __init__(self, **limits: Any) -> None:
        super().__init__(**limits)
        schedule, submit, close = self.core.scheduler.schedule, self.executor.submit, self.executor.sequences.close

        def timed_schedule() -> Any:
            self.now += 1
            return schedule()

        def timed_submit(step: StepInput) -> PagedStepResult:
            self.now += 10
            return submit(step)

        def timed_close(slot: int) -> None:
            self.now += 100
            close(slot)

        self.core.scheduler.schedule = timed_schedule  # type: ignore[method-assign]
        self.executor.submit = timed_submit  # type: ignore[method-assign]
        self.executor.sequences.close = timed_close  # type: ignore[method-assign]


def times(engine: Engine, request_id: str) -> list[tuple[EventType, float]]:
    return [(event.type, event.timestamp) for output in engine.outputs(request_id) for event in output.events]


def seconds(stats: SchedulerStats) -> tuple[float, float, float]:
    return stats.schedule_seconds, stats.execute_seconds, stats.update_seconds


def test_running_waiting_and_tokens() -> None:
    engine = Engine(max_num_seqs=2)
    assert engine.core.stats == SchedulerStats(pages_free=100, pages_total=100)
    for index in range(4):
        engine.add(str(index), [index] * 7, max_tokens=2 + index)
    assert (engine.core.stats.running, engine.core.stats.waiting) == (0, 4)
    seen = []
    while engine.core.has_requests:
        computed = engine.step()
        stats = engine.core.stats
        seen.append((stats.step, stats.running, stats.waiting, stats.prefill_tokens, stats.decode_tokens))
        assert stats.prefill_tokens + stats.decode_tokens == sum(count for _, count in computed.values())
    assert seen == [
        (1, 2, 2, 14, 0),
        (2, 1, 2, 0, 2),  # 0 has ended
        (3, 1, 1, 7, 1),  # 1 has ended, 2 has started
        (4, 2, 0, 7, 1),
        (5, 2, 0, 0, 2),
        (6, 1, 0, 0, 2),
        (7, 1, 0, 0, 1),
        (8, 0, 0, 0, 1),
    ]


def test_cached_tokens_are_those_of_the_step_that_starts_a_request() -> None:
    engine = Engine()
    engine.add("a", PROMPT, max_tokens=3)
    engine.add("b", PROMPT, max_tokens=3)
    engine.step()
    assert engine.core.stats.cached_tokens == 0
    engine.step()
    assert engine.core.stats.cached_tokens == 20
    engine.step()
    assert engine.core.stats.cached_tokens == 0


def test_pages_are_held_then_cached_then_evicted() -> None:
    engine = Engine(num_pages=10)
    engine.add("a", PROMPT, max_tokens=5)
    engine.step()
    stats = engine.core.stats
    assert (stats.pages_free, stats.pages_cached, stats.pages_held, stats.pages_total) == (4, 0, 6, 10)
    engine.finish()
    stats = engine.core.stats
    assert (stats.pages_free, stats.pages_cached, stats.pages_held, stats.evictions) == (4, 6, 0, 0)
    engine.add("b", [1] * 28, max_tokens=1)
    engine.step()
    engine.finish()
    stats = engine.core.stats
    assert (stats.pages_free, stats.pages_cached, stats.pages_held, stats.evictions) == (0, 10, 0, 3)


def test_preemptions_and_the_tokens_that_they_waste() -> None:
    engine = Engine(num_pages=20, enable_prefix_caching=False)
    engine.expect_no_output()
    for index in range(3):
        engine.add(str(index), [index] * 12, max_tokens=24)
    engine.finish()
    stats = engine.core.stats
    preempted = [time for index in range(3) for time in times(engine, str(index)) if time[0] is EventType.PREEMPTED]
    assert stats.preemptions == len(preempted) > 0
    computed = sum(count for step in engine.executor.steps for _, count in step.values())
    assert stats.wasted_tokens == computed - 3 * (12 + 23) > 0


def test_where_the_time_of_a_step_goes() -> None:
    engine = Timed()
    engine.add("a", PROMPT, max_tokens=2)
    engine.step()
    assert seconds(engine.core.stats) == (1, 10, 0)
    engine.step()
    assert seconds(engine.core.stats) == (1, 10, 100)


def test_totals_are_the_sums_over_all_steps() -> None:
    engine = Timed(num_pages=20)
    engine.add("a", PROMPT, max_tokens=3)
    engine.add("b", PROMPT, max_tokens=3)
    steps = []
    while engine.core.has_requests:
        engine.step()
        steps.append(engine.core.stats)
    totals = engine.core.totals
    computed = [step.prefill_tokens + step.decode_tokens for step in steps]
    assert totals.prefill_tokens == sum(step.prefill_tokens for step in steps)
    assert totals.decode_tokens == sum(step.decode_tokens for step in steps)
    assert (totals.prompt_tokens, totals.cached_tokens) == (44, sum(step.cached_tokens for step in steps))
    assert (totals.step_tokens.sum, sum(totals.step_tokens.counts)) == (sum(computed), len(steps))
    assert totals.step_tokens.counts[0] == computed.count(1)
    assert totals.step_seconds.sum == sum(sum(seconds(step)) for step in steps)
    assert totals.execute_seconds == 10 * len(steps)


def test_events_carry_their_times() -> None:
    engine = Timed(num_pages=14, max_num_batched_tokens=8)
    engine.expect_no_output()
    engine.now = 5.0
    engine.add("a", [1] * 8, max_tokens=40)
    engine.now = 7.0
    engine.add("b", [2] * 8, max_tokens=40)
    engine.finish()
    assert times(engine, "a")[:3] == [(EventType.QUEUED, 5), (EventType.SCHEDULED, 8), (EventType.FIRST_TOKEN, 18)]
    assert times(engine, "b")[0] == (EventType.QUEUED, 7)
    received = times(engine, "b")
    preempted = [time for kind, time in received if kind is EventType.PREEMPTED]
    scheduled = [time for kind, time in received if kind is EventType.SCHEDULED]
    assert len(scheduled) == len(preempted) + 1 > 1
    assert [time for _, time in received] == sorted(time for _, time in received)
    assert all((time - 7) % 11 == 1 for time in preempted)  # in `schedule`
