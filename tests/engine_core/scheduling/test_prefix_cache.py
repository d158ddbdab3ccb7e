"""Requests find the KV pages of those before them, also of those that still run."""

from __future__ import annotations

import pytest
from paged_executor import Engine, expected_tokens

from quire.protocol.messages import Abort, FinishReason, UtilityCall, UtilityResult

PROMPT = list(range(100, 122))  # 5 pages of 4, and 2 tokens


def answer(prompt: list[int], count: int) -> list[int]:
    return expected_tokens(prompt, 0, 1000, count)


def cached(engine: Engine, request_id: str) -> int:
    return next(output.num_cached_tokens for output in engine.outputs(request_id) if output.new_token_ids)


def test_the_second_of_two_equal_prompts_waits_and_computes_only_the_rest() -> None:
    engine = Engine()
    engine.add("a", PROMPT, max_tokens=3)
    engine.add("b", PROMPT, max_tokens=3)
    assert engine.step() == {"a": (0, 22)}
    assert engine.step() == {"a": (22, 1), "b": (20, 2)}
    engine.finish()
    assert engine.tokens("a") == engine.tokens("b") == answer(PROMPT, 3)
    assert (cached(engine, "a"), cached(engine, "b")) == (0, 20)


def test_one_that_shares_the_beginning_starts_when_that_is_computed() -> None:
    engine = Engine(max_num_batched_tokens=8)
    engine.add("a", PROMPT, max_tokens=1)
    engine.add("b", [*PROMPT[:8], 1, 2, 3], max_tokens=1)
    engine.add("c", [1, 2, 3], max_tokens=1)
    assert set(engine.step()) == {"a", "c"}
    engine.finish()
    first = next(index for index, step in enumerate(engine.executor.steps) if "b" in step)
    assert engine.executor.steps[first]["b"][0] == 8
    assert "a" in engine.executor.steps[first]
    assert engine.tokens("b") == answer([*PROMPT[:8], 1, 2, 3], 1)


def test_at_least_one_token_is_computed() -> None:
    engine = Engine()
    for name in "ab":
        engine.add(name, PROMPT[:8], max_tokens=1)
        engine.finish()
    assert engine.executor.steps == [{"a": (0, 8)}, {"b": (4, 4)}]
    assert engine.tokens("b") == answer(PROMPT[:8], 1)


def test_the_next_turn_of_a_chat_finds_the_answer_too() -> None:
    engine = Engine()
    engine.add("a", PROMPT, max_tokens=9)
    engine.finish()
    turn = [*PROMPT, *engine.tokens("a"), 7, 7]
    engine.add("b", turn, max_tokens=2)
    engine.finish()
    assert cached(engine, "b") == 28  # of 30 that were computed: full pages
    assert engine.tokens("b") == answer(turn, 2)


def test_salts_share_nothing() -> None:
    engine = Engine()
    for name, salt in (("a", ""), ("b", "tenant"), ("c", "tenant"), ("d", "")):
        engine.add(name, PROMPT, max_tokens=1, cache_salt=salt)
        engine.finish()
    assert [cached(engine, name) for name in "abcd"] == [0, 0, 20, 20]


def test_prompt_logprobs_need_the_prompt_computed() -> None:
    engine = Engine()
    engine.add("a", PROMPT, max_tokens=1)
    engine.finish()
    engine.add("b", PROMPT, max_tokens=1, prompt_logprobs=0)
    engine.finish()
    assert cached(engine, "b") == 0
    assert len(engine.end("b").new_prompt_logprobs or []) == len(PROMPT)


def test_without_the_cache_nothing_is_found_or_kept() -> None:
    engine = Engine(enable_prefix_caching=False)
    for name in "ab":
        engine.add(name, PROMPT, max_tokens=1)
    assert set(engine.step()) == {"a", "b"}
    engine.finish()
    assert engine.core.stats.pages_cached == 0


def test_a_reset_drops_unused_pages() -> None:
    engine = Engine()
    engine.add("a", PROMPT, max_tokens=1)
    engine.finish()
    assert engine.core.stats.pages_cached == 5
    engine.core.receive(b"client", UtilityCall(1, "reset_cache"))
    assert engine.sent[b"client"][-1] == UtilityResult(1, 5)
    engine.add("b", PROMPT, max_tokens=1)
    engine.finish()
    assert cached(engine, "b") == 0


def test_old_pages_make_room() -> None:
    engine = Engine(num_pages=12)
    for index in range(20):
        engine.add(str(index), [index] * 20, max_tokens=8)
        engine.finish()
        assert engine.tokens(str(index)) == answer([index] * 20, 8)
    stats = engine.core.stats
    assert stats.evictions > 0
    assert stats.pages_free + stats.pages_cached == 12


def test_a_preempted_request_comes_back_to_its_pages() -> None:
    engine = Engine(num_pages=20)
    engine.expect_no_output()
    for index in range(3):
        engine.add(str(index), [index] * 12, max_tokens=24)
    engine.finish()
    stats = engine.core.stats
    assert stats.preemptions > 0
    chunks = [chunk for step in engine.executor.steps for chunk in step.values()]
    assert sum(count for _, count in chunks) - 3 * (12 + 23) == stats.wasted_tokens
    assert any(start > 0 and count > 1 for start, count in chunks)
    for index in range(3):
        assert engine.tokens(str(index)) == answer([index] * 12, 24)


def test_one_that_waits_for_the_pages_of_another_goes_on_when_that_is_aborted() -> None:
    engine = Engine(max_num_batched_tokens=8)
    engine.add("a", PROMPT, max_tokens=4, client_id=b"one")
    engine.add("b", PROMPT, max_tokens=4)
    engine.step()

    engine.core.receive(b"one", Abort(["a"]))
    engine.finish()
    assert engine.end("a", b"one").finish_reason is FinishReason.ABORT
    assert engine.tokens("b") == answer(PROMPT, 4)
    assert cached(engine, "b") == 8


def call(engine: Engine, method: str, token_ids: list[int]) -> UtilityResult:
    engine.core.receive(b"client", UtilityCall(1, method, token_ids))
    result = engine.sent[b"client"][-1]
    assert isinstance(result, UtilityResult)
    return result


def test_a_pinned_prefix_outlives_newer_ones() -> None:
    engine = Engine(num_pages=14)
    engine.add("a", PROMPT[:20], max_tokens=1)
    engine.finish()
    assert call(engine, "pin_prefix", PROMPT[:20]).result == 20
    assert engine.executor.sequences.held_pages == 5
    for index in range(6):
        engine.add(str(index), [index] * 20, max_tokens=1)
        while engine.core.has_requests:
            engine.core.step()
    engine.add("b", PROMPT, max_tokens=1)
    while engine.core.has_requests:
        engine.core.step()
    assert cached(engine, "b") == 20
    assert call(engine, "unpin_prefix", PROMPT[:20]).result is True
    assert call(engine, "unpin_prefix", PROMPT[:20]).result is False
    engine.finish()


def test_pins_are_dropped_for_running_requests() -> None:
    engine = Engine(num_pages=8)
    engine.add("a", PROMPT, max_tokens=1)
    engine.finish()
    assert call(engine, "pin_prefix", PROMPT).result == 20
    engine.add("large", list(range(28)), max_tokens=3)
    engine.finish()
    assert engine.tokens("large") == answer(list(range(28)), 3)


@pytest.mark.parametrize(
    ("token_ids", "words"),
    [([], "a prefix of 0 tokens"), ([1000], "allows 0 to 999"), ([1] * 300, "may have 1 to 256")],
)
def test_prefixes_that_cannot_be_pinned(token_ids: list[int], words: str) -> None:
    assert words in (call(Engine(), "pin_prefix", token_ids).error or "")
