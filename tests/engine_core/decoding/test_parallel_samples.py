"""Requests with one prompt compute it once: the others fork from the one that has done so."""

from __future__ import annotations

from typing import Any

import pytest
from paged_executor import Engine, expected_tokens

from quire.protocol.messages import Abort, FinishReason, Goodbye

PROMPT = list(range(100, 122))  # 5 pages of 4, and 2 tokens

with_and_without_cache = pytest.mark.parametrize("cache", [True, False], ids=["cache", "no cache"])


def add(engine: Engine, count: int, prompt: list[int] = PROMPT, **options: Any) -> None:
    """Add `count` requests with one prompt, "0" and so on, each with its number as its seed."""
    for index in range(count):
        other = "0" if index else None
        engine.add(str(index), prompt, seed=index, shares_prompt_with=other, **({"max_tokens": 6} | options))


def num_prompt_tokens_computed(engine: Engine, num_prompt: int = len(PROMPT)) -> int:
    chunks = [chunk for step in engine.executor.steps for chunk in step.values()]
    return sum(max(0, min(start + count, num_prompt) - start) for start, count in chunks)


def check_answers(engine: Engine, count: int, num_tokens: int, prompt: list[int] = PROMPT) -> None:
    for index in range(count):
        assert engine.tokens(str(index)) == expected_tokens(prompt, index, 1000, num_tokens)
        assert engine.end(str(index)).finish_reason is FinishReason.LENGTH


@with_and_without_cache
def test_the_prompt_is_computed_once_and_then_its_last_token(cache: bool) -> None:
    engine = Engine(enable_prefix_caching=cache)
    add(engine, 4)
    assert engine.step() == {"0": (0, 22)}
    assert engine.step() == {"0": (22, 1), "1": (21, 1), "2": (21, 1), "3": (21, 1)}
    engine.finish()
    check_answers(engine, 4, 6)
    assert engine.core.stats.cached_tokens == 0
    assert num_prompt_tokens_computed(engine) == len(PROMPT) + 3


@with_and_without_cache
@pytest.mark.parametrize("length", range(1, 14))
def test_prompts_of_every_length(cache: bool, length: int) -> None:
    engine = Engine(enable_prefix_caching=cache, max_num_batched_tokens=5, max_num_seqs=3)
    add(engine, 5, PROMPT[:length])
    engine.finish()
    check_answers(engine, 5, 6, PROMPT[:length])
    assert num_prompt_tokens_computed(engine, length) == length + 4
    in_full_pages = length == 1 or (cache and length % 4 == 1)  # all but the last token: found without a fork
    assert engine.executor.num_forks == (0 if in_full_pages else 4)


@with_and_without_cache
def test_full_pages_are_shared(cache: bool) -> None:
    engine = Engine(enable_prefix_caching=cache)
    add(engine, 4, max_tokens=3)
    engine.step()
    engine.step()
    assert engine.core.stats.pages_held == 5 + 4


@with_and_without_cache
def test_a_successor_takes_over_from_the_member_that_ends(cache: bool) -> None:
    """Answers of one token, of which none has begun when the first ends."""
    engine = Engine(enable_prefix_caching=cache, max_num_seqs=2)
    add(engine, 7, max_tokens=1)
    engine.finish()
    check_answers(engine, 7, 1)
    assert num_prompt_tokens_computed(engine) == len(PROMPT) + 6


@with_and_without_cache
def test_the_others_go_on_when_the_first_is_aborted_amid_the_prompt(cache: bool) -> None:
    engine = Engine(enable_prefix_caching=cache, max_num_batched_tokens=8)
    add(engine, 3)
    engine.step()
    engine.core.receive(b"client", Abort(["0"]))
    engine.finish()
    assert engine.end("0").finish_reason is FinishReason.ABORT
    for index in (1, 2):
        assert engine.tokens(str(index)) == expected_tokens(PROMPT, index, 1000, 6)


@with_and_without_cache
@pytest.mark.parametrize("leave", [Abort([str(index) for index in range(6)]), Goodbye()])
def test_none_starts_when_all_are_aborted(cache: bool, leave: Abort | Goodbye) -> None:
    engine = Engine(enable_prefix_caching=cache, max_num_seqs=2)
    add(engine, 6)
    for _ in range(3):
        engine.step()
    forks = engine.executor.num_forks
    engine.core.receive(b"client", leave)
    assert not engine.core.has_requests
    assert engine.executor.num_forks == forks
    engine.finish()


@with_and_without_cache
@pytest.mark.parametrize("num_pages", range(9, 26, 2))
def test_with_few_pages(cache: bool, num_pages: int) -> None:
    engine = Engine(enable_prefix_caching=cache, num_pages=num_pages)
    engine.expect_no_output()
    add(engine, 5, max_tokens=10)
    engine.finish()
    check_answers(engine, 5, 10)
    assert (engine.core.stats.preemptions > 0) == (num_pages < 5 + 5 * 3)


def test_prompt_logprobs_of_a_member_are_computed() -> None:
    engine = Engine()
    engine.add("0", PROMPT, max_tokens=3)
    engine.add("1", PROMPT, max_tokens=3, shares_prompt_with="0", prompt_logprobs=0)
    engine.finish()
    [received] = [output.new_prompt_logprobs for output in engine.outputs("1") if output.new_prompt_logprobs]
    assert len(received) == len(PROMPT)


def test_a_member_that_has_ended_has_no_effect() -> None:
    engine = Engine(enable_prefix_caching=False)
    for name in "01":
        engine.add(name, PROMPT, max_tokens=2, shares_prompt_with="0" if name == "1" else None)
        engine.finish()
    assert engine.tokens("0") == engine.tokens("1")


@pytest.mark.parametrize("other", [{"prompt": PROMPT[:-1]}, {"cache_salt": "mine"}])
def test_a_request_that_differs_is_rejected(other: dict[str, Any]) -> None:
    engine = Engine()
    engine.add("0", PROMPT)
    engine.add("1", other.pop("prompt", PROMPT), shares_prompt_with="0", **other)
    engine.finish()
    assert engine.end("1").finish_reason is FinishReason.ERROR
    assert "another prompt, cache_salt or adapter" in (engine.end("1").error or "")
