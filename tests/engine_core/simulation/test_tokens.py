"""Tokens of simulated prompts and answers are equal where they should be, and nowhere else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from workloads import lcp

from quire.engine_core.simulation.executor import EOS, VOCAB_SIZE, answer_tokens, prompt_tokens

BLOCKS = st.lists(st.integers(-(2**62), 2**63), min_size=1, max_size=6)


@given(BLOCKS, BLOCKS, st.sampled_from([16, 32, 100, 512]))
def test_prompts_share_what_their_blocks_share(one: list[int], other: list[int], size: int) -> None:
    mine, yours = prompt_tokens(one, size, size * len(one)), prompt_tokens(other, size, size * len(other))
    assert len(mine) == size * len(one)
    assert all(0 <= token < VOCAB_SIZE and token != EOS for token in mine)
    shared = lcp(one, other)
    assert size * shared <= lcp(mine, yours) < size * shared + 16 or shared in (len(one), len(other))
    for place in range(shared, min(len(one), len(other))):
        if one[place] != other[place]:
            assert mine[place * size : (place + 1) * size] != yours[place * size : (place + 1) * size]


def test_a_prompt_is_cut_to_its_length() -> None:
    assert prompt_tokens([5, 6], 100, 130) == prompt_tokens([5, 6], 100, 200)[:130]


def test_a_prompt_needs_all_its_blocks() -> None:
    with pytest.raises(ValueError, match="1 blocks of 64 tokens can't make a prompt of 65; give 2 blocks"):
        prompt_tokens([1], 64, 65)


def test_answers_differ_from_each_other_and_from_prompts() -> None:
    names = {answer_tokens(number) for number in range(1000)} | {bytes(prompt_tokens([n], 16, 16)) for n in range(1000)}
    assert len(names) == 2000
