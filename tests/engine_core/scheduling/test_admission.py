"""The estimate of output lengths, and the share of the growth that pages are kept for."""

from __future__ import annotations

import random
from typing import Any

import pytest

from quire.engine_core.scheduling.admission import Admission
from quire.protocol.engine_shape import EngineShape


def make_admission(**limits: Any) -> Admission:
    sizes: dict[str, Any] = {
        "vocab_size": 1000,
        "max_model_len": 4096,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 512,
    }
    return Admission(EngineShape(**(sizes | {"block_size": 32, "num_pages": 1000} | limits)))


def test_the_estimate_becomes_the_mean_length() -> None:
    admission = make_admission()
    for _ in range(500):
        admission.decoded(200)
        admission.ended()
    assert admission.output_tokens == pytest.approx(200, rel=0.05)


def test_short_answers_that_end_first_do_not_mislead_it() -> None:
    """Half of the answers have 10 tokens, half 590; all begin at once, so at first only short ones have ended."""
    admission = make_admission()
    left = [10] * 30 + [590] * 30
    random.Random(0).shuffle(left)
    while left:
        admission.decoded(len(left))
        left = [tokens - 1 for tokens in left]
        for _ in range(left.count(0)):
            admission.ended()
        left = [tokens for tokens in left if tokens]
        if len(left) == 30:
            assert admission.output_tokens > 50


def test_preemptions_reserve_more_and_answers_without_them_less() -> None:
    admission = make_admission()
    assert admission.reserved_share == 1
    for _ in range(1000):
        admission.ended()
    assert 0 < (calm := admission.reserved_share) < 0.9
    admission.preempted(num_victims=1, num_running=5)
    assert calm < admission.reserved_share <= 1
    assert admission.max_running == 5
    for _ in range(5000):
        admission.ended()
    assert admission.reserved_share == 0
    admission.preempted(num_victims=100, num_running=5)
    assert admission.reserved_share == 1


def test_the_limit_on_running_requests_grows_back() -> None:
    admission = make_admission(max_num_seqs=8)
    admission.preempted(num_victims=1, num_running=0)
    assert admission.max_running == 1
    for _ in range(1000):
        admission.stepped()
    assert admission.max_running == 8
