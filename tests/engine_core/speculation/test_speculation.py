"""What drafts cost and when they pay."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from quire.engine_core.speculation.costs import DraftCosts


def learned(plain: float, with_drafts: float, num_decodes: int = 1, num_drafts: int = 4) -> DraftCosts:
    """Return what is learned of steps of these seconds; half of the drafts hold."""
    costs = DraftCosts()
    for _ in range(50):
        costs.learn(num_decodes, 0, num_decodes, plain, 0.0)
    for _ in range(60):
        costs.learn(num_decodes, num_drafts, num_decodes + num_drafts // 2, with_drafts, 0.0)
    return costs


def test_a_cheap_draft_pays_at_a_low_probability() -> None:
    """0.4 ms for a draft, where 10.4 ms give 3 tokens."""
    assert learned(0.010, 0.0116).least_probability(1) == pytest.approx(0.0004 * 3 / 0.0116, rel=0.2)


def test_a_draft_that_takes_as_long_as_a_token_never_pays() -> None:
    assert learned(0.010, 0.050).least_probability(1) > 0.55
    assert learned(0.010, 0.012, 8, 4).least_probability(8) == pytest.approx(0.0005 * 10 / 0.012, rel=0.2)
    assert learned(0.010, 0.016, 32, 8).least_probability(32) > 1


def test_time_before_the_step_counts() -> None:
    costs = learned(0.010, 0.0116)
    assert costs.least_probability(1, seconds=0.002) > 2 * costs.least_probability(1)


def test_nothing_is_drafted_before_plain_steps_are_known_and_now_and_then() -> None:
    costs = DraftCosts()
    for _ in range(3):
        assert costs.least_probability(1) == math.inf
        costs.learn(1, 0, 1, 0.01, 0.0)
    plain = [0, 0]
    for step in range(8000):
        if costs.least_probability(1) >= 1:
            plain[step >= 2000] += 1
            costs.learn(1, 0, 1, 0.01, 0.0)
        else:
            costs.learn(1, 4, 3, 0.011, 0.0)
    assert 40 <= plain[0] <= 50
    assert 90 <= plain[1] <= 95


def test_the_first_steps_may_take_longer() -> None:
    """Drafts that gain nothing seem to gain by comparison."""
    costs, steps = DraftCosts(), 0
    for seconds in (0.02, 0.01, 0.015):
        costs.learn(1, 0, 1, seconds, 0.0)
    while costs.allows(1):
        steps += 1
        pays = costs.least_probability(1) < 1
        costs.learn(1, 4 * pays, 1, 0.012 if pays else 0.01, 0.0)
    assert steps < 50


def test_bad_measurements_are_forgotten_and_one_of_them_hardly_counts() -> None:
    costs = learned(0.010, 0.5)
    assert costs.least_probability(1) > 0.6
    for _ in range(10_000):
        costs.learn(1, 0, 1, 0.01, 0.0)
    assert costs.least_probability(1) < 0.5
    for _ in range(10):
        costs.learn(1, 4, 5, 0.012, 0.0)
    costs.learn(1, 4, 1, 3.0, 0.0)
    assert costs.least_probability(1) < 0.5


def seconds_with_drafts(steps: int, num_tokens: Callable[[], int], seconds: float, own: float) -> tuple[float, float]:
    """Return how long steps of one stream take, and how long steps without drafts would take for as many tokens.

    Those with drafts take `seconds`, and those without 0.01; `own` is what finding none takes.
    """
    costs, taken, tokens = DraftCosts(), 0.0, 0
    for _ in range(steps):
        if costs.least_probability(1) < 1:
            count, step, mine = num_tokens(), seconds, own
        else:
            count, mine = 1, own if costs.allows(1) else 0.0
            step = 0.01 + mine
        costs.learn(1, 4 if count > 1 or step == seconds else 0, count, step, mine)
        taken += step
        tokens += count
    return taken, 0.01 * tokens


@pytest.mark.parametrize(("held", "seconds"), [(0.0, 0.011), (0.4, 0.016), (0.5, 0.03), (0.2, 0.1)])
def test_drafts_that_do_not_pay_cost_little(held: float, seconds: float) -> None:
    """However good they look, one by one."""
    rng = random.Random(1)
    taken, without = seconds_with_drafts(20_000, lambda: 1 + (rng.random() < held), seconds, 0.0)
    assert taken < 1.02 * without


def test_looking_for_drafts_in_vain_costs_little_and_what_is_cheap_goes_on() -> None:
    costs = DraftCosts()
    allowed = 0
    for _ in range(10_000):
        allows = costs.allows(1)
        allowed += allows
        costs.learn(1, 0, 1, 0.01 + 0.001 * allows, 0.001 * allows)
    assert allowed < 1500
    while costs.allows(1):
        costs.learn(1, 0, 1, 0.011, 0.001)
    assert costs.allows(1, 0.00001)
    assert not costs.allows(1, 0.001)


def test_drafts_that_pay_go_on_whatever_a_few_of_them_lose() -> None:
    rng = random.Random(2)
    taken, without = seconds_with_drafts(20_000, lambda: rng.choice((1, 1, 1, 5)), 0.013, 0.0)
    assert taken < 0.69 * without


def test_what_a_prompt_takes_is_paid_later() -> None:
    """It ends no trial, but counts in the end."""
    costs = DraftCosts()
    for _ in range(3):
        costs.learn(1, 0, 1, 0.01, 0.0)
    costs.learn_beside_prompts(1, 0, 0, 0.001, 0.15)
    for _ in range(500):
        assert costs.allows(1)
        costs.learn(1, 2, 2, 0.018, 0.0)
    costs.learn_beside_prompts(1, 0, 0, 0.001, 0.15)
    while costs.allows(1):
        costs.learn(1, 2, 2, 0.0199, 0.0)
        costs.learn_beside_prompts(1, 0, 0, 0.001, 0.002)


def test_a_draft_beside_prompts_pays_if_a_step_without_takes_longer_for_its_tokens() -> None:
    """Eight sequences take 10 ms without; a token of a prompt takes 0.5 ms, and the draft 0.1 ms before."""
    costs = DraftCosts()
    assert costs.least_beside_prompts(8, 0.0006) == math.inf
    for _ in range(3):
        costs.learn(8, 0, 8, 0.01, 0.0)
    assert costs.least_beside_prompts(8, 0.0006) == pytest.approx(0.48)
    assert costs.least_beside_prompts(8, 0.0) == math.inf


@pytest.mark.parametrize(("accepted", "own_seconds"), [(0, 0.03), (2, 0.03), (0, 0.0)])
def test_drafts_pause_where_every_step_has_prompts_too(accepted: int, own_seconds: float) -> None:
    """Steps of 150 ms, in which drafts lose time."""
    costs, lost = DraftCosts(), 0.0
    for _ in range(3):
        costs.learn(8, 0, 8, 0.05, 0.0)
    for _ in range(20_000):
        if costs.allows(8):
            costs.learn_beside_prompts(8, 16, accepted, 0.002, own_seconds)
            lost += own_seconds + 16 * 0.002 - accepted * 0.05 / 8
        else:
            costs.learn_beside_prompts(8, 0, 0, 0.002, 0.0)
    assert 0 < lost < 0.01 * 20_000 * 0.15
