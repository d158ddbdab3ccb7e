"""The costs of steps that are learned from reports."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.protocol.messages import SchedulerStats
from quire.protocol.routing.step_costs import StepCosts, StepSeconds

TRUE = StepSeconds(4e-3, 2e-5, 3e-4)


def seconds_of(costs: StepSeconds, prefill: int, decode: int) -> float:
    return costs.base + costs.prefill * prefill + costs.decode * decode


def observe(costs: StepCosts, prefill: int, decode: int, seconds: float) -> None:
    parts = (0.1 * seconds, 0.8 * seconds, 0.1 * seconds)
    costs.observe(SchedulerStats(1, 1, 0, prefill, decode, schedule_seconds=parts[0], execute_seconds=parts[1],
                                 update_seconds=parts[2]))  # fmt: skip


def learn(costs: StepCosts, count: int, true: StepSeconds = TRUE, *, noise: float = 0.1, seed: int = 0) -> None:
    """Learn from steps of all kinds whose times are off by about `noise`."""
    random_ = random.Random(seed)
    for _ in range(count):
        prefill, decode = random_.choice([0, 0, 200, 1000, 2000]), random_.randint(0, 30)
        observe(costs, prefill, decode, seconds_of(true, prefill, decode) * random_.gauss(1, noise))


def test_costs_are_found_among_noise() -> None:
    costs = StepCosts()
    learn(costs, 1000)
    assert costs.seconds == pytest.approx(TRUE, rel=0.2)


def test_costs_that_change_are_learned_again() -> None:
    costs, slower = StepCosts(), StepSeconds(*(3 * each for each in TRUE))
    learn(costs, 1000)
    learn(costs, 3000, slower, seed=1)
    assert costs.seconds == pytest.approx(slower, rel=0.2)


@pytest.mark.parametrize(("prefill", "decode"), [(0, 8), (500, 0), (500, 8), (1, 0), (0, 1)])
def test_steps_that_are_all_the_same_are_predicted(prefill: int, decode: int) -> None:
    """Nothing tells the terms apart then."""
    costs = StepCosts()
    for _ in range(2000):
        observe(costs, prefill, decode, 0.02)
    assert seconds_of(costs.seconds, prefill, decode) == pytest.approx(0.02, rel=0.01)
    assert min(costs.seconds) >= 0


def test_what_steps_have_not_shown_for_long_stays_known() -> None:
    costs = StepCosts()
    learn(costs, 500, noise=0.0)
    for step in range(8_000):
        observe(costs, 0, 1 + step % 9, seconds_of(TRUE, 0, 1 + step % 9))
    assert costs.seconds == pytest.approx(TRUE, rel=0.1)


def test_an_engine_without_steps_costs_what_the_others_do() -> None:
    shared = StepCosts()
    new = StepCosts(shared)
    learn(shared, 100, noise=0.0)
    assert new.seconds == shared.seconds
    for size in range(1, 5):
        observe(new, 0, size, 2 * seconds_of(TRUE, 0, size))
    assert new.seconds.prefill == pytest.approx(TRUE.prefill, rel=0.5)  # which it has not shown


def test_an_engine_that_differs_is_known_by_its_own_steps() -> None:
    shared, slower = StepCosts(), StepSeconds(*(5 * each for each in TRUE))
    own = StepCosts(shared)
    learn(shared, 300)
    learn(own, 1000, slower, seed=2)
    assert own.seconds == pytest.approx(slower, rel=0.25)


@settings(max_examples=40)
@given(st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 10**4), st.floats(0, 1e4)), min_size=1, max_size=60))
def test_costs_are_never_negative(steps: Sequence[tuple[int, int, float]]) -> None:
    shared = StepCosts()
    own = StepCosts(shared)
    for prefill, decode, seconds in steps:
        for costs in (own, shared):
            observe(costs, prefill, decode, seconds)
            assert min(costs.seconds) >= 0
            assert max(costs.seconds) < 1e9


def test_a_step_without_work_teaches_nothing() -> None:
    costs = StepCosts()
    for _ in range(100):
        observe(costs, 0, 0, 100.0)
    assert costs.seconds == StepSeconds()
