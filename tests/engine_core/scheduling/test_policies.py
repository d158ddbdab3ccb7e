"""The order of waiting requests under each policy, bounds of the queue, and deadlines."""

from __future__ import annotations

import itertools

import pytest
from paged_executor import Engine, expected_tokens

from quire.engine_core.scheduling.policies import AGING_SECONDS, MAX_TIMES_PASSED_OVER, POLICIES
from quire.protocol.messages import FinishReason


def order(engine: Engine) -> list[str]:
    """Step to the end; return the requests in the order in which they first ran."""
    engine.finish()
    return list(dict.fromkeys(name for step in engine.executor.steps for name in step))


def answer(prompt: list[int], count: int) -> list[int]:
    return expected_tokens(prompt, 0, 1000, count)


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_serves_all_requests(policy: str) -> None:
    engine = Engine(scheduling_policy=policy, num_pages=30, max_num_seqs=3)
    prompts = [[index % 3] * (1 + 5 * index % 17) + [index] for index in range(20)]
    for index, prompt in enumerate(prompts):
        engine.now += 0.01
        engine.add(str(index), prompt, max_tokens=6)
    engine.finish()
    for index, prompt in enumerate(prompts):
        assert engine.tokens(str(index)) == answer(prompt, 6)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_crowd_that_takes_long_to_look_at_starts_bit_by_bit(policy: str) -> None:
    engine = Engine(scheduling_policy=policy)
    seconds = itertools.count()
    engine.core.scheduler._clock = lambda: float(next(seconds))  # whatever is done takes too long
    for index in range(5):
        engine.add(str(index), [index], max_tokens=9)
    assert [len(engine.step()) for _ in range(5)] == [1, 2, 3, 4, 5]
    engine.finish()


def test_the_least_priority_comes_first_until_another_has_waited_long_enough() -> None:
    engine = Engine(scheduling_policy="priority", max_num_seqs=1)
    engine.add("running", [1], max_tokens=2, priority=0)
    engine.step()
    engine.add("low", [1], max_tokens=1, priority=2)
    engine.add("high", [1], max_tokens=1, priority=1)
    engine.now = 2.5 * AGING_SECONDS
    engine.add("late", [1], max_tokens=1, priority=0)
    assert order(engine) == ["running", "high", "low", "late"]


def test_other_policies_reject_a_priority() -> None:
    engine = Engine()
    engine.add("a", [1], max_tokens=1, priority=1)
    engine.core.flush()
    assert "start the engine with --scheduling-policy priority" in (engine.end("a").error or "")


def test_the_least_important_is_preempted() -> None:
    engine = Engine(scheduling_policy="priority", num_pages=16)
    engine.expect_no_output()
    engine.add("low", [1] * 4, max_tokens=40, priority=1)
    engine.add("high", [2] * 24, max_tokens=20, priority=0)
    while not engine.core.stats.preemptions:
        engine.step()
    assert [request.request_id for request in engine.core.scheduler.running] == ["high"]


def test_the_shortest_prompt_comes_first_until_a_long_one_has_waited() -> None:
    engine = Engine(scheduling_policy="sjf", max_num_seqs=1)
    engine.add("running", [1], max_tokens=2)
    engine.step()
    engine.add("long", [1] * 30, max_tokens=1)
    engine.add("short", [2] * 5, max_tokens=1)
    engine.now = 1.0
    engine.add("late", [3], max_tokens=1)
    assert order(engine) == ["running", "short", "long", "late"]


def test_cached_tokens_count_as_computed() -> None:
    engine = Engine(scheduling_policy="sjf", max_num_seqs=1, max_num_batched_tokens=100)
    base = list(range(40))
    engine.add("running", base, max_tokens=2)
    engine.step()
    engine.add("short", [9] * 8, max_tokens=1)
    engine.add("long", [8] * 30, max_tokens=1)
    engine.add("cached", [*base, 1, 2], max_tokens=1)
    assert order(engine) == ["running", "cached", "short", "long"]


def test_the_longest_prefix_comes_first() -> None:
    engine = Engine(scheduling_policy="lpm", max_num_seqs=1, max_num_batched_tokens=100)
    base = list(range(40))
    engine.add("running", base, max_tokens=2)
    engine.step()
    engine.add("none", [9] * 8, max_tokens=1)
    engine.add("some", [*base[:8], 1, 2], max_tokens=1)
    engine.add("most", [*base[:24], 1, 2], max_tokens=1)
    assert order(engine) == ["running", "most", "some", "none"]


def test_no_request_is_passed_over_more_often_than_the_bound() -> None:
    engine = Engine(scheduling_policy="lpm", max_num_seqs=1, max_num_batched_tokens=100, num_pages=1000)
    base = list(range(40))
    engine.add("first", base, max_tokens=1)
    engine.finish()
    engine.add("running", base, max_tokens=2)
    engine.step()
    engine.add("alone", [9] * 8, max_tokens=1)
    for index in range(2 * MAX_TIMES_PASSED_OVER):
        engine.add(str(index), [*base, index], max_tokens=1)
    names = order(engine)
    assert names.index("alone") == 2 + MAX_TIMES_PASSED_OVER


def test_no_request_waits_for_the_pages_of_another_beyond_the_bound() -> None:
    """The next page of `waits` is always the one that `slow` computes in this step."""
    engine = Engine(scheduling_policy="lpm", max_num_batched_tokens=8, num_pages=1000)
    base = list(range(200))
    engine.add("slow", base, max_tokens=1)
    engine.step()
    engine.add("waits", [*base, 7], max_tokens=1)
    for index in range(MAX_TIMES_PASSED_OVER):
        engine.add(str(index), [900 - index] * 4, max_tokens=1)
        engine.step()
        assert [request.request_id for request in engine.core.scheduler.waiting] == ["waits"]
    engine.step()
    assert not engine.core.scheduler.waiting
    engine.finish()
    assert engine.tokens("waits") == answer([*base, 7], 1)


def test_a_full_queue_rejects_with_its_length() -> None:
    engine = Engine(max_num_seqs=1, max_waiting_requests=2)
    engine.add("a", [1, 2, 3], max_tokens=2)
    engine.step()
    for name in "bcd":
        engine.add(name, [1, 2, 3], max_tokens=2)
    engine.finish()
    assert engine.end("d").finish_reason is FinishReason.ERROR
    assert engine.end("d").error == (
        "the engine is overloaded: 2 requests with 6 prompt tokens are waiting, and 2 requests with 16777216 tokens "
        "may; try again later"
    )
    assert engine.tokens("c") == answer([1, 2, 3], 2)


def test_a_queue_is_bounded_in_tokens_too() -> None:
    engine = Engine(max_waiting_tokens=10)
    engine.add("a", [1] * 8, max_tokens=1)
    engine.add("b", [1] * 8, max_tokens=1)
    engine.core.flush()
    assert "1 requests with 8 prompt tokens are waiting" in (engine.end("b").error or "")
    engine.finish()
    assert engine.tokens("a") == answer([1] * 8, 1)


def test_a_deadline_ends_a_request_where_it_stands() -> None:
    engine = Engine(max_num_seqs=1)
    engine.add("runs", [1], max_tokens=50, timeout=1.0)
    engine.add("waits", [2], max_tokens=50, timeout=0.5)
    engine.add("patient", [3], max_tokens=2)
    engine.step()
    engine.now = 0.6
    engine.step()
    assert engine.end("waits").finish_reason is FinishReason.TIMEOUT
    assert "0.5 s that the request was given was up before it could start" in (engine.end("waits").error or "")
    engine.now = 1.1
    engine.finish()
    assert engine.end("runs").finish_reason is FinishReason.TIMEOUT
    assert "while it ran, after 2 tokens" in (engine.end("runs").error or "")
    assert engine.tokens("patient") == answer([3], 2)


def test_requests_that_end_in_time_are_forgotten() -> None:
    engine = Engine()
    for index in range(500):
        engine.add(str(index), [1], max_tokens=1, timeout=3600.0)
        engine.finish()
    assert len(engine.core._requests._deadlines) < 100


@pytest.mark.parametrize("timeout", [0.0, -1.0, float("nan"), float("inf")])
def test_an_invalid_timeout_is_rejected(timeout: float) -> None:
    engine = Engine()
    engine.add("a", [1], max_tokens=1, timeout=timeout)
    engine.core.flush()
    assert "must be a number of seconds above 0" in (engine.end("a").error or "")
