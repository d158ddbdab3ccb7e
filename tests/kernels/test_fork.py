"""A sequence that forks from another computes what one of its own would have computed, bit for bit."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from quire.kernels import options, runner
from quire.kernels._native import SamplingConfig, Sequences
from quire.kernels.runner import ModelRunner
from quire.kernels.step import StepInput

STEPS = 3


@pytest.fixture(
    scope="module", params=[{}, {"kv_cache_dtype": "int8", "block_size": 64}, {"dtype": "float32"}], ids=str
)
def engine(request: pytest.FixtureRequest, demo_model: Path) -> ModelRunner:
    return runner.load_model(options.LoadOptions(str(demo_model), num_pages=64, threads=2, **request.param))


def tokens_of(engine: ModelRunner, length: int) -> list[int]:
    choose = random.Random(5)
    return [choose.randrange(engine.vocab_size) for _ in range(length)]


def opened(engine: ModelRunner, tokens: list[int], seed: int = 0, salt: str | None = None) -> int:
    return engine.sequences.open(tokens, len(tokens), sampling=SamplingConfig(seed=seed, logprobs=3), cache_salt=salt)


def answer(engine: ModelRunner, slot: int, start: int) -> list[object]:
    """A few steps, the first from `start`; the tokens and all log probabilities."""
    found: list[object] = []
    for _ in range(STEPS):
        end = len(engine.sequences.tokens(slot))
        assert engine.sequences.reserve(slot, end)
        result = engine.run(StepInput([slot], [start], [end - start]))
        found += [result.token_ids, result.logprobs(0)]
        start = end
    return found


def alone(engine: ModelRunner, tokens: list[int], seed: int) -> list[object]:
    slot = opened(engine, tokens, seed)
    try:
        return answer(engine, slot, 0)
    finally:
        engine.sequences.close(slot)


@pytest.mark.parametrize("salt", [None, "salt"])
@pytest.mark.parametrize("length", [2, 3, 31, 32, 33, 34, 63, 64, 65, 66, 95, 97, 130])
def test_a_fork_at_every_place_of_a_page(engine: ModelRunner, salt: str | None, length: int) -> None:
    """The source has gone on by a few tokens; it goes on undisturbed when the fork has written to its copy."""
    tokens = tokens_of(engine, length)
    source = opened(engine, tokens, 1, salt)
    first = answer(engine, source, 0)
    fork = opened(engine, tokens, 2, salt)
    assert engine.fork(fork, source, length - 1, length)
    full = (length - 1) // engine.block_size
    pages, own = engine.sequences.pages(source), engine.sequences.pages(fork)
    assert own[:full] == pages[:full]
    assert not set(own[full:]) & set(pages)
    assert engine.sequences.held_pages == len(set(pages) | set(own))
    assert answer(engine, fork, length - 1) == alone(engine, tokens, 2)
    more = answer(engine, source, length + STEPS - 1)
    engine.sequences.close(source)
    whole = opened(engine, tokens, 1)
    assert answer(engine, whole, 0) == first
    assert answer(engine, whole, length + STEPS - 1) == more
    for slot in (whole, fork):
        engine.sequences.close(slot)
    assert engine.sequences.held_pages == 0
    engine.sequences.tree.evict(64)
    assert engine.sequences.free_pages == 64


def test_forks_of_forks_closed_in_any_order() -> None:
    """Pages without a model: every page has an owner until the last of them is closed, and then none."""
    choose = random.Random(7)
    for salt in (None, "salt"):
        for _ in range(200):
            sequences = Sequences(40, 32, 1000)
            tokens = [choose.randrange(1000) for _ in range(150)]
            slots = [sequences.open(tokens, 150, cache_salt=salt)]
            assert sequences.start(slots[0], 150) == 0
            sequences.share(slots[0], 150)
            for _ in range(10):
                source = choose.choice(slots)
                held = {page for slot in slots for page in sequences.pages(slot)}
                computed = choose.randint(1, len(sequences.tokens(source)))
                slot = sequences.open(tokens[: choose.randint(computed, 150)], 1, cache_salt=salt)
                length = len(sequences.tokens(slot))
                if not sequences.fork(slot, source, computed, length):
                    sequences.close(slot)
                    assert sequences.held_pages == len(held)
                    continue
                slots.append(slot)
                assert len(sequences.pages(slot)) == -(-length // 32)
                sequences.share(slot, computed)
            choose.shuffle(slots)
            while slots:
                held = {page for slot in slots for page in sequences.pages(slot)}
                assert sequences.held_pages == len(held)
                assert sequences.free_pages + sequences.cached_pages + sequences.held_pages == 40
                sequences.close(slots.pop())
            assert sequences.held_pages == 0
            sequences.tree.evict(40)
            assert sequences.free_pages == 40


def test_what_can_not_fork() -> None:
    sequences = Sequences(4, 32, 100)
    source = sequences.open([1] * 40, 40)
    assert sequences.start(source, 40) == 0
    for tokens, salt, count in (([1] * 30 + [2] * 10, None, 31), ([1] * 40, "salt", 8), ([1] * 8, None, 9)):
        slot = sequences.open(tokens, len(tokens), cache_salt=salt)
        with pytest.raises(ValueError, match="same salt"):
            sequences.fork(slot, source, count, 40)
        sequences.close(slot)
    slot = sequences.open([1] * 90, 90)
    assert not sequences.fork(slot, source, 40, 128)
    assert (sequences.pages(slot), sequences.held_pages) == ([], 2)
    assert sequences.fork(slot, source, 40, 90)
    with pytest.raises(RuntimeError, match="has pages already"):
        sequences.fork(slot, source, 40, 90)
