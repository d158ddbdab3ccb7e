"""The prefill budget, as it follows from the times of earlier steps."""

from __future__ import annotations

import math

import msgspec
import pytest

from quire.engine_core.decoding.single import SingleSequence
from quire.engine_core.request import Request
from quire.engine_core.scheduling.prefill_budget import PrefillBudget
from quire.kernels.runner import Sequences
from quire.protocol.engine_shape import EngineShape
from quire.protocol.messages import EngineCoreRequest, SamplingParams

LIMITS = EngineShape(
    vocab_size=1000, max_model_len=4096, max_num_seqs=64, max_num_batched_tokens=512, block_size=32, num_pages=1000
)

SEQUENCES = Sequences(1, 32, 1000)


def prompt_of(num_tokens: int, arrival: float = 0.0, number: int = 0) -> Request:
    message = EngineCoreRequest("a", [1] * num_tokens, SamplingParams())
    decoding = SingleSequence(message, LIMITS)
    request = Request.from_message(
        b"client", message, decoding, seed=0, now=arrival, limits=LIMITS, sequences=SEQUENCES
    )
    request.number = number
    return request


def budget_of(target_itl: float, decode_seconds: float, token_seconds: float) -> PrefillBudget:
    """Return a budget that has learned these times."""
    budget = PrefillBudget(msgspec.structs.replace(LIMITS, target_itl=target_itl))
    budget.learn(0.0, 4, decode_seconds)
    budget.learn(1000.0, 4, decode_seconds + 1000.0 * token_seconds)
    return budget


@pytest.mark.parametrize("num_decodes", [0, 4])
@pytest.mark.parametrize("seconds", [0.0, math.ulp(0.0), 1e-300, 1e-3, 1e9, 1e300])
def test_steps_of_any_length_leave_a_budget_to_share(seconds: float, num_decodes: int) -> None:
    budget = PrefillBudget(LIMITS)
    budget.learn(0.0, num_decodes, 1e-3)
    budget.learn(1.0, num_decodes, seconds)
    max_cost = budget.max_cost(num_decodes, backlog=100_000)
    assert 0 < max_cost < math.inf
    [(_, count)] = budget.share([prompt_of(2000)], 512, max_cost, now=0.0)
    assert 0 < count <= 512


def test_prefill_hardly_slows_concurrent_decodes() -> None:
    budget = budget_of(0.0, 0.01, 1e-4)
    assert budget.max_cost(4, backlog=0) == pytest.approx(70, rel=0.01)
    assert budget.max_cost(4, backlog=1_000_000) == pytest.approx(300, rel=0.01)
    assert budget.max_cost(0, backlog=0) == pytest.approx(5000, rel=0.01)


@pytest.mark.parametrize(
    ("decode_seconds", "backlog", "cost"),
    [(0.002, 0, 230), (0.01, 0, 150), (0.01, 1_000_000, 300), (0.02, 0, 140), (0.04, 0, 280), (0.04, 10**6, 1200)],
)
def test_a_step_with_prompts_may_take_as_long_as_the_target(decode_seconds: float, backlog: int, cost: float) -> None:
    budget = budget_of(25.0, decode_seconds, 1e-4)
    assert budget.max_cost(4, backlog) == pytest.approx(cost, rel=0.01)
    assert budget.max_cost(0, backlog) == pytest.approx(5000, rel=0.01)


def test_the_first_prompt_beside_decoding_requests_is_a_small_one() -> None:
    """A short first prompt teaches nothing, and a step may take seconds."""
    budget = PrefillBudget(LIMITS)
    budget.learn(10.0, 0, 0.1)
    budget.learn(0.0, 1, 0.05)
    max_cost = budget.max_cost(1, backlog=0)
    [(request, count)] = budget.share([prompt_of(2000)], 512, max_cost, now=0.0)
    assert 24 <= count <= 32
    budget.learn(budget.cost([(request, count)]), 1, 0.05 + count * 0.005)
    assert budget.max_cost(1, backlog=0) == pytest.approx(24)
    assert budget.max_cost(0, backlog=0) == pytest.approx(100, rel=0.01)


def test_decodes_that_never_had_a_step_of_their_own_are_measured_beside_prompts() -> None:
    budget = PrefillBudget(LIMITS)
    budget.learn(100.0, 0, 0.1)
    budget.learn(50.0, 4, 0.05 + 0.2)
    assert budget.max_cost(4, backlog=0) == pytest.approx(140, rel=0.01)


def order_of(prompts: list[Request], now: float, max_cost: float = 1e6) -> list[tuple[int, int]]:
    """Return the numbers of the prompts that get a share, and the tokens that each gets."""
    return [(request.number, count) for request, count in PrefillBudget(LIMITS).share(prompts, 4096, max_cost, now)]


def test_the_shortest_of_a_burst_comes_first() -> None:
    prompts = [prompt_of(length, number=number) for number, length in enumerate([900, 300, 600, 20])]
    assert order_of(prompts, now=0.01) == [(3, 20), (1, 300), (2, 600), (0, 900)]


@pytest.mark.parametrize(("waited", "first"), [(0.0, 1), (0.69, 1), (0.71, 0), (5.0, 0)])
def test_a_long_prompt_that_has_waited_is_passed_over_no_more(waited: float, first: int) -> None:
    prompts = [prompt_of(800, number=0), prompt_of(100, waited, number=1)]
    assert order_of(prompts, now=waited)[0][0] == first


def test_a_short_prompt_waits_for_a_long_one_in_proportion_to_its_length() -> None:
    prompts = [prompt_of(800, number=0), prompt_of(100, 5.0, number=1)]
    assert [order_of(prompts, now)[0][0] for now in (5.0, 5.5, 5.7)] == [0, 0, 1]


def test_the_oldest_prompt_gets_its_share_of_every_step() -> None:
    prompts = [prompt_of(4000, number=0), *(prompt_of(30, 9.0, number=number) for number in range(1, 100))]
    shares = dict(order_of(prompts, now=9.2, max_cost=400.0))
    assert 64 <= shares[0] <= 100
    assert sum(shares.values()) <= 400
