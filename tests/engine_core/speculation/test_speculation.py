"""What drafts cost and when they pay."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from quire.engine_core.scheduling.batch import Batch
from quire.engine_core.speculation.costs import DraftCosts
from quire.engine_core.speculation.progress import DraftGain, Progress


def accepted(number: int) -> DraftGain:
    """Return what so many drafts bring to one stream."""
    return DraftGain(number, number)


def learned(plain: float, with_drafts: float, num_decodes: int = 1, num_drafts: int = 4) -> DraftCosts:
    """Return what is learned of steps of these seconds; half of the drafts hold."""
    costs = DraftCosts()
    for _ in range(50):
        costs.learn(num_decodes, 0, DraftGain(), plain, 0.0)
    for _ in range(60):
        costs.learn(num_decodes, num_drafts, DraftGain(num_drafts // 2, refilled=1.0), with_drafts, 0.0)
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
        costs.learn(1, 0, DraftGain(), 0.01, 0.0)
    plain = [0, 0]
    for step in range(8000):
        if costs.least_probability(1) >= 1:
            plain[step >= 2000] += 1
            costs.learn(1, 0, DraftGain(), 0.01, 0.0)
        else:
            costs.learn(1, 4, accepted(2), 0.011, 0.0)
    assert 40 <= plain[0] <= 50
    assert 90 <= plain[1] <= 95


def test_the_first_steps_may_take_longer() -> None:
    """Drafts that gain nothing seem to gain by comparison."""
    costs, steps = DraftCosts(), 0
    for seconds in (0.02, 0.01, 0.015):
        costs.learn(1, 0, DraftGain(), seconds, 0.0)
    while costs.allows(1):
        steps += 1
        pays = costs.least_probability(1) < 1
        costs.learn(1, 4 * pays, DraftGain(), 0.012 if pays else 0.01, 0.0)
    assert steps < 50


def test_bad_measurements_are_forgotten_and_one_of_them_hardly_counts() -> None:
    costs = learned(0.010, 0.5)
    assert costs.least_probability(1) > 0.6
    for _ in range(10_000):
        costs.learn(1, 0, DraftGain(), 0.01, 0.0)
    assert costs.least_probability(1) < 0.5
    for _ in range(10):
        costs.learn(1, 4, accepted(4), 0.012, 0.0)
    costs.learn(1, 4, DraftGain(), 3.0, 0.0)
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
        costs.learn(1, 4 if count > 1 or step == seconds else 0, accepted(count - 1), step, mine)
        taken += step
        tokens += count
    return taken, 0.01 * tokens


@pytest.mark.parametrize(("held", "seconds"), [(0.0, 0.011), (0.4, 0.016), (0.5, 0.03), (0.2, 0.1)])
def test_drafts_that_do_not_pay_cost_little(held: float, seconds: float) -> None:
    """However good they look, one by one."""
    rng = random.Random(1)
    taken, without = seconds_with_drafts(20_000, lambda: 1 + (rng.random() < held), seconds, 0.0)
    assert taken < 1.02 * without


@pytest.mark.parametrize("seconds", [0.015, 0.03])
def test_an_engine_that_has_just_started_does_not_try_for_long(seconds: float) -> None:
    taken, without = seconds_with_drafts(64, lambda: 1, seconds, 0.0)
    assert taken < without + max(0.03 * without, seconds)  # one step tells


def test_looking_for_drafts_in_vain_costs_little_and_what_is_cheap_goes_on() -> None:
    costs = DraftCosts()
    allowed = 0
    for _ in range(10_000):
        allows = costs.allows(1)
        allowed += allows
        costs.learn(1, 0, DraftGain(), 0.01 + 0.001 * allows, 0.001 * allows)
    assert allowed < 1500
    while costs.allows(1):
        costs.learn(1, 0, DraftGain(), 0.011, 0.001)
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
        costs.learn(1, 0, DraftGain(), 0.01, 0.0)
    costs.learn_beside_prompts(1, 0, DraftGain(), 0.001, 0.15)
    for _ in range(500):
        assert costs.allows(1)
        costs.learn(1, 2, accepted(1), 0.018, 0.0)
    costs.learn_beside_prompts(1, 0, DraftGain(), 0.001, 0.15)
    while costs.allows(1):
        costs.learn(1, 2, accepted(1), 0.0199, 0.0)
        costs.learn_beside_prompts(1, 0, DraftGain(), 0.001, 0.002)


def test_a_draft_beside_prompts_pays_if_a_step_without_takes_longer_for_its_tokens() -> None:
    """Eight sequences take 10 ms without; a token of a prompt takes 0.5 ms, and the draft 0.1 ms before."""
    costs = DraftCosts()
    assert costs.least_beside_prompts(8, 0.0006) == math.inf
    for _ in range(3):
        costs.learn(8, 0, DraftGain(), 0.01, 0.0)
    assert costs.least_beside_prompts(8, 0.0006) == pytest.approx(0.48)
    assert costs.least_beside_prompts(8, 0.0) == math.inf


@pytest.mark.parametrize(("accepted", "own_seconds"), [(0, 0.03), (2, 0.03), (0, 0.0)])
def test_drafts_pause_where_every_step_has_prompts_too(accepted: int, own_seconds: float) -> None:
    """Steps of 150 ms, in which drafts lose time."""
    costs, lost = DraftCosts(), 0.0
    for _ in range(3):
        costs.learn(8, 0, DraftGain(), 0.05, 0.0)
    for _ in range(20_000):
        if costs.allows(8):
            costs.learn_beside_prompts(8, 16, DraftGain(accepted, 0, 1.0), 0.002, own_seconds)
            lost += own_seconds + 16 * 0.002 - accepted * 0.05 / 8
        else:
            costs.learn_beside_prompts(8, 0, DraftGain(), 0.002, 0.0)
    assert 0 < lost < 0.01 * 20_000 * 0.15


def batch_of(requests: list[Any], accepted: list[int], num_wide: int = 0) -> Batch:
    """Return a batch after its step; `num_wide` rows are of requests with several sequences."""
    batch = Batch(requests=requests, accepted=accepted + [0] * num_wide, num_single_decodes=len(requests))
    batch.num_decode_rows = len(requests) + num_wide
    return batch


def test_a_batch_comes_on_by_what_its_slowest_sequence_gains() -> None:
    a, b, c = requests = [SimpleNamespace(number=number) for number in range(3)]
    progress = Progress()
    assert progress.gain_of(batch_of(requests, [0, 0, 0])) == DraftGain()
    assert progress.gain_of(batch_of(requests, [4, 0, 1])) == DraftGain(5, 0)
    assert progress.gain_of(batch_of(requests, [0, 3, 1])) == DraftGain(4, 2)  # 2, 1 and 0 are left
    assert progress.gain_of(batch_of([a, c], [0, 1])) == DraftGain(1, 1)
    assert progress.gain_of(batch_of([a, b], [1, 2])) == DraftGain(3, 2)  # b has joined
    assert progress.gain_of(batch_of([b], [5], num_wide=2)) == DraftGain(5, 0)


def test_a_place_is_worth_something_if_another_request_takes_it() -> None:
    progress, batch = Progress(), batch_of([SimpleNamespace(number=1)], [1])

    def refilled() -> float:
        return progress.gain_of(batch).refilled

    for _ in range(4):
        progress.begin()
    assert refilled() == 0  # these took nobody's place
    progress.end(4)
    progress.begin()
    first = refilled()
    assert first > 0
    progress.end(3)  # where a fourth waits
    second = refilled()
    assert second > first
    for num_running in (3, 2, 1):  # the batch ends, and nobody came
        progress.end(num_running)
    assert refilled() < second
    for _ in range(100):
        progress.begin()
        progress.begin()
        progress.end(2)
        progress.end(1)
    assert refilled() < 0.01


@pytest.mark.parametrize(("refilled", "slowest"), [(0.0, 0), (0.0, 3), (1.0, 0)])
def test_drafts_of_one_sequence_pay_only_where_others_get_its_place(refilled: float, slowest: int) -> None:
    """Four sequences of one length take as long as the slowest, if nobody comes after them."""
    costs, lost, steps = DraftCosts(), 0.0, 20_000
    for _ in range(3):
        costs.learn(4, 0, DraftGain(), 0.01, 0.0)
    for _ in range(steps):
        if costs.least_probability(4) < 1:
            costs.learn(4, 8, DraftGain(max(4 * slowest, 4), slowest, refilled), 0.013, 0.0)
            lost += 0.013 - 0.01 * (1 + slowest) - (0 if slowest else 4 * 0.003 / 8)
        else:
            costs.learn(4, 0, DraftGain(), 0.01, 0.0)
    if refilled:
        assert lost > 0.9 * steps * 0.0015  # of this batch, but the next one starts the earlier
    elif slowest:
        assert lost < -0.9 * steps * 0.027
    else:
        assert 0 < lost < 0.02 * steps * 0.01


def test_drafts_rest_while_they_pause() -> None:
    costs, rested = DraftCosts(), 0
    assert costs.rest(1) == 0
    for _ in range(500):
        costs.learn(1, 0, DraftGain(), 0.01, 0.0)
    while costs.allows(1):
        assert costs.rest(1) == 0
        costs.learn(1, 4, DraftGain(), 0.02, 0.0)
    while not costs.allows(1):
        rest = costs.rest(1)
        assert rest <= 32
        rested += 1 + rest
        costs.learn(1, 0, DraftGain(), 0.01, 0.0)
    assert 300 < rested < 700


@pytest.mark.parametrize(
    ("probability", "drafting", "most"), [(0.25, 0.0012, -0.03), (0.15, 0.0004, 0.02), (0, 0.0004, 0.02)]
)
def test_a_head_pays_for_the_features_that_steps_keep_for_it(probability: float, drafting: float, most: float) -> None:
    """A step takes 10 ms, and 0.9 ms more with features; `most` is the share of the time that is lost, or gained."""
    costs, rng, steps, lost, num_kept = DraftCosts(keeps=True), random.Random(1), 20_000, 0.0, 0
    for _ in range(steps):
        keeps = costs.keeps(1, 0.0001)
        drafts = keeps and costs.least_probability(1) < 1
        gain = accepted(1) if drafts and rng.random() < probability else DraftGain()
        seconds = 0.01 + 0.0009 * keeps + drafting * drafts
        costs.learn(1, 2 * drafts, gain, seconds, 0.0, keeps=keeps)
        lost += seconds - 0.01 * (1 + gain.num_accepted)
        num_kept += keeps
    assert lost < most * steps * 0.01
    assert num_kept > (0.9 * steps if most < 0 else 3)
