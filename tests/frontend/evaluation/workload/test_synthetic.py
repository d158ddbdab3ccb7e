"""Synthetic requests have the requested lengths, and fit the context or name a length that does."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.frontend.evaluation.workload.blocks import Prompts, blocks_for
from quire.frontend.evaluation.workload.sharing import infinite_cache_hits
from quire.frontend.evaluation.workload.synthetic import RandomWorkload

CONTEXT = 100


def error_of(workload: RandomWorkload) -> str:
    """Return the error for these lengths; empty if they fit."""
    try:
        workload.requests(1, CONTEXT)
    except ValueError as error:
        return str(error)
    return ""


@given(
    input_len=st.integers(1, 150),
    output_len=st.integers(1, 150),
    range_ratio=st.floats(0, 0.99),
    prefix_len=st.integers(0, 120),
)
def test_lengths_that_may_not_fit_are_rejected_with_a_length_that_does(
    input_len: int, output_len: int, range_ratio: float, prefix_len: int
) -> None:
    workload = RandomWorkload(input_len, output_len, range_ratio, prefix_len)
    error = error_of(workload)
    if "--output-len" in error:
        assert "--output-len" in error_of(replace(workload, input_len=1))
        return
    if error:
        advised = int(error.split()[-3])
        assert advised < input_len
        workload = replace(workload, input_len=advised)
    requests = workload.requests(20, CONTEXT)
    assert all(request.prompt_tokens + request.output_tokens <= CONTEXT for request in requests)


def test_a_context_of_unknown_length_rejects_no_request() -> None:
    assert len([*RandomWorkload(10**6, 1).requests(3, None)]) == 3


@pytest.mark.parametrize(
    ("workload", "num", "name"),
    [
        (RandomWorkload(1, 1), 0, "num"),
        (RandomWorkload(0, 1), 1, "input_len"),
        (RandomWorkload(1, 0), 1, "output_len"),
        (RandomWorkload(1, 1, 1.0), 1, "range_ratio"),
        (RandomWorkload(1, 1, prefix_len=-1), 1, "prefix_len"),
    ],
)
def test_a_value_out_of_range_is_named_at_once(workload: RandomWorkload, num: int, name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name}="):
        workload.requests(num)


def test_requests_have_lengths_in_the_range_and_share_only_the_prefix() -> None:
    requests = list(RandomWorkload(100, 20, 0.5, 64).requests(500, seed=1))
    assert len(requests) == 500
    assert {each.prompt_tokens - 64 for each in requests} == set(range(50, 151))
    assert {each.output_tokens for each in requests} == set(range(10, 31))
    assert all(len(each.blocks) == blocks_for(each.prompt_tokens, each.block_tokens) for each in requests)
    assert infinite_cache_hits(requests, 1) == 499 * 64
    first, second = (Prompts(1 << 14).tokens(each) for each in requests[:2])
    assert first[:64] == second[:64]


def test_requests_without_a_prefix_share_nothing() -> None:
    requests = list(RandomWorkload(1000, 8).requests(20))
    assert {(each.prompt_tokens, each.output_tokens) for each in requests} == {(1000, 8)}
    assert infinite_cache_hits(requests, 1) == 0
