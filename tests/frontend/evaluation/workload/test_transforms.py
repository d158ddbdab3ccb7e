"""Scaled and clipped workloads keep their shared prefixes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from workloads import lcp, workloads

from quire.frontend.evaluation.workload.blocks import blocks_for
from quire.frontend.evaluation.workload.request import WorkloadRequest
from quire.frontend.evaluation.workload.sharing import shared_blocks
from quire.frontend.evaluation.workload.transforms import clip, scale_lengths, speed_up


def check_blocks(requests: list[WorkloadRequest]) -> None:
    for request in requests:
        assert request.prompt_tokens >= 1
        assert request.output_tokens >= 1
        assert len(request.blocks) == blocks_for(request.prompt_tokens, request.block_tokens)


def check_prompt_length(before: WorkloadRequest, after: WorkloadRequest, factor: float) -> None:
    """Each block is within 5 % of its exact length, and the last is cut to a whole number of tokens, 1 at least."""
    exact = before.prompt_tokens * factor
    assert abs(after.prompt_tokens - exact) <= 0.05 * exact + 1


@given(workloads((512,)), st.floats(0.04, 4))
def test_scaled_prompts_share_exactly_the_blocks_they_shared(requests: list[WorkloadRequest], factor: float) -> None:
    scaled = list(scale_lengths(requests, factor))
    check_blocks(scaled)
    assert [request.blocks for request in scaled] == [request.blocks for request in requests]
    assert shared_blocks(scaled) == shared_blocks(requests)
    for before, after in zip(requests, scaled, strict=True):
        check_prompt_length(before, after, factor)
        assert after.output_tokens == max(1, round(before.output_tokens * factor))


@given(workloads((1, 7, 32)), st.floats(1e-4, 1))
@example([WorkloadRequest(0, 33, 1, tuple(range(5)), block_tokens=7)], 0.898)  # 28 tokens of 29.6
def test_small_blocks_are_joined_and_prompts_share_no_more_than_before(
    requests: list[WorkloadRequest], factor: float
) -> None:
    scaled = list(scale_lengths(requests, factor))
    check_blocks(scaled)
    (size,) = {request.block_tokens for request in scaled}
    joined = round(size / factor / requests[0].block_tokens)
    for number, one in enumerate(scaled):
        check_prompt_length(requests[number], one, factor)
        for other in range(number):
            before = lcp(requests[number].blocks, requests[other].blocks)
            after = lcp(one.blocks, scaled[other].blocks)
            assert after >= before // joined
            assert after <= -(-before // joined)


@pytest.mark.parametrize(("factor", "tokens"), [(1e-300, 1), (1e-9, 1), (1e-4, 3)])
def test_a_tiny_factor_leaves_a_token_at_least(factor: float, tokens: int) -> None:
    (request,) = scale_lengths([WorkloadRequest(0, 25_600, 5, tuple(range(50)))], factor)
    assert (request.prompt_tokens, request.output_tokens) == (tokens, 1)
    check_blocks([request])


def test_outputs_are_scaled_by_a_factor_of_their_own() -> None:
    request = WorkloadRequest(0, 1000, 300, (0, 1))
    (scaled,) = scale_lengths([request], 1, 0.1)
    assert (scaled.prompt_tokens, scaled.blocks, scaled.output_tokens) == (1000, (0, 1), 30)
    (scaled,) = scale_lengths([request], 0.5, 1)
    assert (scaled.prompt_tokens, scaled.block_tokens, scaled.output_tokens) == (500, 256, 300)


@given(workloads(), st.integers(2, 700))
def test_clipped_requests_fit_and_share_their_remaining_prefixes(
    requests: list[WorkloadRequest], max_model_len: int
) -> None:
    clipped = list(clip(requests, max_model_len))
    check_blocks(clipped)
    for before, after in zip(requests, clipped, strict=True):
        assert after.prompt_tokens + after.output_tokens <= max_model_len
        assert after.prompt_tokens <= before.prompt_tokens
        assert min(before.output_tokens, max_model_len // 2) <= after.output_tokens <= before.output_tokens
        assert after.blocks == before.blocks[: len(after.blocks)]
        if before.prompt_tokens + before.output_tokens <= max_model_len:
            assert after == before


@pytest.mark.parametrize(
    ("prompt", "output", "expected"),
    [(900, 50, (50, 50)), (20, 900, (20, 80)), (900, 900, (50, 50)), (60, 45, (55, 45)), (50, 50, (50, 50))],
)
def test_the_prompt_gives_way_before_the_output(prompt: int, output: int, expected: tuple[int, int]) -> None:
    (clipped,) = clip([WorkloadRequest(0, prompt, output, tuple(range(blocks_for(prompt))))], 100)
    assert (clipped.prompt_tokens, clipped.output_tokens) == expected


def test_a_text_prompt_stays_whole() -> None:
    request = WorkloadRequest(0, 1000, 300, (0, 1), text="Once")
    (scaled,) = scale_lengths([request], 0.1)
    assert (scaled.prompt_tokens, scaled.output_tokens) == (1000, 30)
    assert [next(clip([request], most)).output_tokens for most in (1200, 500)] == [200, 1]


def test_speed_is_that_of_arrivals_and_delays() -> None:
    (request,) = speed_up([WorkloadRequest(10, 1, 1, (0,), delay=4)], 4)
    assert (request.arrival, request.delay) == (2.5, 1.0)


@pytest.mark.parametrize("factor", [0, -1, float("nan"), float("inf")])
@pytest.mark.parametrize("transform", [speed_up, scale_lengths])
def test_a_factor_out_of_range_is_named(transform: Any, factor: float) -> None:
    with pytest.raises(ValueError, match="must be a finite number above 0"):
        list(transform([], factor))
    with pytest.raises(ValueError, match="must be at least 2"):
        list(clip([], 1))
