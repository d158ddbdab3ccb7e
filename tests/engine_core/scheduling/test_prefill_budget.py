"""The prefill budget, as it follows from the times of earlier steps."""

from __future__ import annotations

import math

import pytest

from quire.engine_core.decoding.single import SingleSequence
from quire.engine_core.request import Request
from quire.engine_core.scheduling.prefill_budget import PrefillBudget
from quire.protocol.engine_shape import EngineShape
from quire.protocol.messages import EngineCoreRequest, SamplingParams

LIMITS = EngineShape(
    vocab_size=1000, max_model_len=4096, max_num_seqs=64, max_num_batched_tokens=512, block_size=32, num_pages=1000
)


def prompt_of(num_tokens: int) -> Request:
    message = EngineCoreRequest("a", [1] * num_tokens, SamplingParams())
    return Request.from_message(b"client", message, SingleSequence(message, LIMITS), seed=0, now=0.0, limits=LIMITS)


@pytest.mark.parametrize("num_decodes", [0, 4])
@pytest.mark.parametrize("seconds", [0.0, math.ulp(0.0), 1e-300, 1e-3, 1e9, 1e300])
def test_steps_of_any_length_leave_a_budget_to_share(seconds: float, num_decodes: int) -> None:
    budget = PrefillBudget(LIMITS)
    budget.learn(0.0, num_decodes, 1e-3)
    budget.learn(1.0, num_decodes, seconds)
    max_cost = budget.max_cost(num_decodes, backlog=100_000)
    assert 0 < max_cost < math.inf
    [(_, count)] = budget.share([prompt_of(2000)], 512, max_cost)
    assert 0 < count <= 512


def test_prefill_hardly_slows_concurrent_decodes() -> None:
    budget = PrefillBudget(LIMITS)
    budget.learn(0.0, 4, 0.01)
    budget.learn(1000.0, 4, 0.11)
    assert budget.max_cost(4, backlog=0) == pytest.approx(70, rel=0.01)
    assert budget.max_cost(4, backlog=1_000_000) == pytest.approx(300, rel=0.01)
    assert budget.max_cost(0, backlog=0) == pytest.approx(5000, rel=0.01)
