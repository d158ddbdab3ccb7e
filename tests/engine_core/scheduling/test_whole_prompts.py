"""Prompts of an encoder are computed in one step each, whatever else waits, and leave nothing in the prefix cache."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from paged_executor import Engine, expected_vector

from quire.protocol.messages import ErrorKind, FinishReason
from quire.protocol.pooling_info import PoolingInfo

ENCODER = PoolingInfo(generates=False, pooling_type="mean", is_encoder=True, num_token_types=2)


def encoder(**limits: int) -> Engine:
    """Return an engine whose model is an encoder, as one that has loaded it sets its limits."""
    sizes: dict[str, Any] = {"max_model_len": 32, "max_num_batched_tokens": 32, "num_pages": 20} | limits
    return Engine(pooling=ENCODER, enable_prefix_caching=False, **sizes)


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(1, 32), st.integers(0, 3)), min_size=1, max_size=14), st.integers(8, 20))
def test_each_prompt_is_computed_whole(requests: list[tuple[int, int]], num_pages: int) -> None:
    """Requests of these lengths come after this many steps each; only some fit a step, or the pages, together."""
    engine = encoder(num_pages=num_pages)
    prompts = {}
    for number, (length, num_steps) in enumerate(requests):
        prompts[str(number)] = [100 + number] * length
        engine.embed(str(number), prompts[str(number)], pooling_type="mean")
        for _ in range(num_steps):
            engine.step()
    engine.finish()
    computed = [(name, span) for step in engine.executor.steps for name, span in step.items()]
    assert sorted(computed) == sorted((name, (0, len(prompt))) for name, prompt in prompts.items())
    assert all(sum(count for _, count in step.values()) <= 32 for step in engine.executor.steps)
    for name, prompt in prompts.items():
        assert engine.end(name).pooled == expected_vector(prompt, "mean")
        assert engine.end(name).num_cached_tokens == 0
    assert engine.executor.sequences.free_pages == num_pages


def test_a_step_takes_as_many_whole_prompts_as_fit_the_oldest_first() -> None:
    engine = encoder()
    for name, length in (("a", 10), ("b", 30), ("c", 20), ("d", 3)):
        engine.embed(name, [ord(name)] * length)
    assert engine.step() == {"a": (0, 10), "c": (0, 20)}
    assert engine.step() == {"b": (0, 30)}
    assert engine.step() == {"d": (0, 3)}
    engine.finish()


def test_the_same_prompt_again_is_computed_again() -> None:
    engine = encoder()
    for name in "ab":
        engine.embed(name, list(range(20)))
        assert engine.step() == {name: (0, 20)}
    engine.finish()


def test_it_generates_no_text() -> None:
    engine = encoder()
    engine.add("a", [1, 2, 3])
    end = engine.end_now("a")
    assert (end.finish_reason, end.error_kind) == (FinishReason.ERROR, ErrorKind.INVALID)
    assert end.error == "this model generates no text; it embeds"
