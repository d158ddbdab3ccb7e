"""What drafts cost and when they pay; and an engine whose drafting fails."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

import pytest
from simulations import STEP_TIME, request, setup

from quire.engine_core.request import Request
from quire.engine_core.simulation.engine import SimulatedAnswer, SimulatedEngine, limits_of
from quire.engine_core.speculation.costs import DraftCosts
from quire.engine_core.speculation.proposer import Proposer
from quire.engine_core.speculation.speculation import Speculation
from quire.kernels.runner import Sequences


def learned(plain: float, with_drafts: float, num_decodes: int = 1, num_drafts: int = 4) -> DraftCosts:
    """Return what is learned of steps of these seconds; half of the drafts hold."""
    costs = DraftCosts()
    for _ in range(50):
        costs.learn(num_decodes, 0, num_decodes, plain)
    for _ in range(60):
        costs.learn(num_decodes, num_drafts, num_decodes + num_drafts // 2, with_drafts)
    return costs


def test_a_cheap_draft_pays_at_a_low_probability() -> None:
    """0.4 ms for a draft, where 10.4 ms give 3 tokens."""
    assert learned(0.010, 0.0116).least_probability(1) == pytest.approx(0.0004 * 3 / 0.0116, rel=0.2)


def test_a_draft_that_takes_as_long_as_a_token_never_pays() -> None:
    assert learned(0.010, 0.050).least_probability(1) > 0.55
    assert learned(0.010, 0.014, 8, 4).least_probability(8) == pytest.approx(0.001 * 10 / 0.014, rel=0.2)
    assert learned(0.010, 0.016, 32, 8).least_probability(32) > 1


def test_time_before_the_step_counts() -> None:
    costs = learned(0.010, 0.0116)
    assert costs.least_probability(1, seconds=0.002) > 2 * costs.least_probability(1)


def test_nothing_is_drafted_before_a_plain_step_is_known_and_now_and_then() -> None:
    costs = DraftCosts()
    assert costs.least_probability(1) == math.inf
    costs.learn(1, 0, 1, 0.01)
    plain = 0
    for _ in range(650):
        if costs.least_probability(1) >= 1:
            plain += 1
            costs.learn(1, 0, 1, 0.01)
        else:
            costs.learn(1, 4, 3, 0.011)
    assert 8 <= plain <= 11


def test_bad_measurements_are_forgotten_and_one_of_them_hardly_counts() -> None:
    costs = learned(0.010, 0.5)
    assert costs.least_probability(1) > 0.6
    for _ in range(1500):
        costs.learn(1, 0, 1, 0.01)
    assert costs.least_probability(1) < 0.5
    costs.learn(1, 4, 1, 3.0)
    assert costs.least_probability(1) < 0.5


class _Failing(Proposer):
    """Appends a draft, and fails."""

    def __init__(self, sequences: Sequences) -> None:
        self._sequences = sequences
        self.num_calls = 0

    def propose(self, requests: Sequence[Request], most: list[int], least: float) -> list[int]:
        self.num_calls += 1
        for each in requests:
            self._sequences.append(each.slot, 1)
        raise RuntimeError("out of ideas")

    def learn(self, slots: list[int], accepted: list[int]) -> None:
        raise AssertionError("nothing was computed")


def test_an_engine_whose_drafting_fails_goes_on_without(caplog: pytest.LogCaptureFixture) -> None:
    limits, answers = limits_of(setup().engine), list[SimulatedAnswer]()
    engine = SimulatedEngine(limits, STEP_TIME, is_stepwise=True, on_end=answers.append)
    failing = _Failing(engine.executor.sequences)
    engine.core.scheduler.speculation = Speculation(failing, engine.executor.sequences, 4, limits)
    for index in range(3):
        engine.send(request(index, 0.0, 40, 50, range(1)), 0.0, 0.0)
    with caplog.at_level(logging.ERROR):
        while engine.next_step < math.inf:
            engine.step()
    assert [len(answer.token_times) for answer in answers] == [50] * 3
    assert failing.num_calls == 1
    assert "drafting has failed" in caplog.text
    summary = engine.summary
    assert summary.pages_held == 0
    assert summary.pages_free + summary.pages_cached == limits.num_pages
