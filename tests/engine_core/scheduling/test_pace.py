"""How much of prompts a step may compute, by what the steps before it took."""

from __future__ import annotations

import math

import pytest

from quire.engine_core.limits import EngineLimits
from quire.engine_core.request import Request
from quire.engine_core.scheduling.pace import Pace
from quire.protocol.messages import EngineCoreRequest, SamplingParams

LIMITS = EngineLimits(
    vocab_size=1000, max_model_len=4096, max_num_seqs=64, max_num_batched_tokens=512, block_size=32, num_pages=1000
)


def prompt_of(num_tokens: int) -> Request:
    message = EngineCoreRequest("a", [1] * num_tokens, SamplingParams())
    return Request.from_message(b"client", message, seed=0, now=0.0, limits=LIMITS)


@pytest.mark.parametrize("num_decodes", [0, 4])
@pytest.mark.parametrize("seconds", [0.0, math.ulp(0.0), 1e-300, 1e-3, 1e9, 1e300])
def test_steps_of_any_length_leave_a_budget_that_can_be_shared(seconds: float, num_decodes: int) -> None:
    pace = Pace(LIMITS)
    pace.learn(0.0, num_decodes, 1e-3)
    pace.learn(1.0, num_decodes, seconds)
    budget = pace.budget(num_decodes, backlog=100_000)
    assert 0 < budget < math.inf
    [(_, count)] = pace.share([prompt_of(2000)], 512, budget)
    assert 0 < count <= 512


def test_a_prompt_gets_what_the_decodes_beside_it_hardly_notice() -> None:
    pace = Pace(LIMITS)
    pace.learn(0.0, 4, 0.01)
    pace.learn(1000.0, 4, 0.11)
    assert pace.budget(4, backlog=0) == pytest.approx(70, rel=0.01)
    assert pace.budget(4, backlog=1_000_000) == pytest.approx(300, rel=0.01)
    assert pace.budget(0, backlog=0) == pytest.approx(5000, rel=0.01)
