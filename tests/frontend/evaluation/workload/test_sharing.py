"""Shared prefixes are counted, and tokens are equal exactly where blocks are."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from workloads import lcp, workloads

from quire.frontend.evaluation.workload.blocks import Prompts
from quire.frontend.evaluation.workload.request import BLOCK_TOKENS, WorkloadRequest
from quire.frontend.evaluation.workload.sharing import infinite_cache_hits, shared_blocks

VOCAB_SIZE = 1 << 14


def test_the_infinite_cache_counts_full_pages_and_leaves_a_token() -> None:
    first = WorkloadRequest(0, 700, 1, (0, 1))
    assert infinite_cache_hits([first, first], 32) == 672
    assert infinite_cache_hits([first, WorkloadRequest(1, 512, 1, (0,))], 32) == 480
    assert infinite_cache_hits([first, WorkloadRequest(1, 1024, 1, (0, 1))], 32) == 672
    assert infinite_cache_hits([first, WorkloadRequest(1, 1024, 1, (2, 1))], 32) == 0


@given(workloads(), st.sampled_from([1, 16, 32, 128]))
def test_the_infinite_cache_agrees_with_a_search_through_all_earlier_prompts(
    requests: list[WorkloadRequest], block_size: int
) -> None:
    prompts = [Prompts(VOCAB_SIZE).tokens(request) for request in requests]
    hits = 0
    for number, prompt in enumerate(prompts):
        shared = max((lcp(prompt[:-1], earlier) for earlier in prompts[:number]), default=0)
        hits += shared // block_size * block_size
    assert infinite_cache_hits(requests, block_size) == hits


def test_a_block_is_shared_if_it_came_before_behind_the_same_blocks() -> None:
    requests = [WorkloadRequest(0, len(blocks) * BLOCK_TOKENS, 1, blocks) for blocks in ((0, 1), (0, 1, 2), (3, 1))]
    assert shared_blocks(requests) == pytest.approx(2 / 7)


@given(workloads())
def test_prompts_have_their_length_and_are_equal_where_their_blocks_are(requests: list[WorkloadRequest]) -> None:
    prompts = Prompts(VOCAB_SIZE)
    whole = [(request, prompts.tokens(request)) for request in requests]
    size = requests[0].block_tokens
    for one, tokens in whole:
        assert len(tokens) == one.prompt_tokens
        for other, others in whole:
            blocks = lcp(one.blocks, other.blocks)
            equal = min(blocks * size, one.prompt_tokens, other.prompt_tokens)
            assert tokens[:equal] == others[:equal]
            rest = tokens[equal : equal + 16], others[equal : equal + 16]
            assert rest[0] != rest[1] or min(map(len, rest)) < 4


def test_no_two_blocks_have_tokens_in_common_by_a_pattern() -> None:
    prompts = Prompts(VOCAB_SIZE)
    seen: set[tuple[int, ...]] = set()
    for block in range(300):
        tokens = prompts.tokens(WorkloadRequest(0, BLOCK_TOKENS, 1, (block,)))
        runs = {tuple(tokens[place : place + 4]) for place in range(BLOCK_TOKENS - 3)}
        assert not runs & seen
        seen |= runs


def test_tokens_are_in_the_vocabulary_and_not_avoided() -> None:
    request = WorkloadRequest(0, 5000, 1, tuple(range(10)))
    assert set(Prompts(20, avoid=(0, 19)).tokens(request)) == set(range(1, 19))
    assert Prompts(VOCAB_SIZE, 1).tokens(request) != Prompts(VOCAB_SIZE, 2).tokens(request)
    with pytest.raises(ValueError, match="leaves no token"):
        Prompts(2, avoid=(0, 1))


def test_the_names_of_blocks_may_be_any_that_a_trace_has() -> None:
    prompts = Prompts(VOCAB_SIZE)
    tokens = {tuple(prompts.tokens(WorkloadRequest(0, 100, 1, (name,)))) for name in (0, 1, -1, 2**62, 2**63 - 1)}
    assert len(tokens) == 5
