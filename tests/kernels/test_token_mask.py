"""Masks: what the sampler draws under one, and a step that does not wait long for a late one."""

from __future__ import annotations

import ctypes
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.kernels import _native, options, runner
from quire.kernels.runner import ModelRunner, TokenMask


def mask_of(allowed: list[int], num_tokens: int) -> TokenMask:
    mask = TokenMask(num_tokens)
    mask.allow(allowed)
    mask.publish()
    return mask


def draw(logits: np.ndarray, mask: TokenMask | None, position: int = 0, **config: Any) -> dict[str, Any]:
    return _native.sample(logits.astype(np.float32), [], 0, position, config, mask)


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 64, 300, 4099])
def test_only_what_is_allowed_is_drawn_and_as_if_there_were_nothing_else(vocab_size: int) -> None:
    random = np.random.default_rng(vocab_size)
    for position in range(50):
        logits = random.normal(size=vocab_size)
        allowed = sorted(random.choice(vocab_size, size=random.integers(1, vocab_size + 1), replace=False).tolist())
        banned = np.where(np.isin(np.arange(vocab_size), allowed), logits, -np.inf)
        config = {"seed": 7, "top_p": 0.9 if position % 2 else 1.0, "logprobs": 1}
        got = draw(logits, mask_of(allowed, vocab_size), position, **config)
        first = draw(logits, None, position, **config)["token"]
        if position % 2:
            assert got["token"] == draw(banned, None, position, **config)["token"]
        elif first in allowed:
            assert got["token"] == first
        assert got["token"] in allowed
        raw = logits.astype(np.float32).astype(np.float64)
        expected = raw[got["token"]] - np.log(np.exp(raw).sum())
        assert got["logprob"] == pytest.approx(expected, abs=1e-4)  # of the model alone
        assert got["top_ids"] == [int(np.argmax(logits.astype(np.float32)))]


@pytest.mark.parametrize(("allowed", "most"), [([0, 2, 3, 5], 16.3), ([2, 4, 5], 13.8), ([4, 5], 10.8)])
def test_guesses_leave_the_distribution_as_it_is(allowed: list[int], most: float) -> None:
    """`most` is what chi squared reaches by chance once in a thousand times."""
    logits, draws = np.array([2.0, 1.0, 0.0, 1.5, -1.0, 0.5]), 20_000
    counts = np.zeros(len(logits))
    for position in range(draws):
        counts[draw(logits, mask_of(allowed, len(logits)), position, seed=1)["token"]] += 1
    expected = np.where(np.isin(np.arange(len(logits)), allowed), np.exp(logits), 0)
    expected *= draws / expected.sum()
    assert counts.sum() == counts[allowed].sum()
    assert ((counts - expected)[allowed] ** 2 / expected[allowed]).sum() < most


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_few_tokens_are_drawn_like_many(temperature: float) -> None:
    """One part in eight of the vocabulary is looked at token by token, and what is more as a whole."""
    random = np.random.default_rng(5)
    for position in range(400):
        logits = np.append(random.normal(size=63), -1000.0)
        mask = mask_of(random.choice(63, size=8, replace=False).tolist(), 64)
        config = {"seed": 9, "temperature": temperature, "logprobs": 2}
        few, many = draw(logits, mask, position, **config), draw(logits[:63], mask, position, **config)
        assert few == many


def test_tokens_beyond_the_mask_are_banned() -> None:
    logits = np.arange(100.0)
    assert draw(logits, mask_of([3, 5], 40), temperature=0.0)["token"] == 5


def test_bits_beyond_the_vocabulary_mean_nothing() -> None:
    assert draw(np.arange(10.0), mask_of([3, 31], 32), temperature=0.0)["token"] == 3


@pytest.mark.parametrize(
    "config", [{"allowed": [1, 2]}, {"bad_words": [[5]]}, {"stop_token_ids": [5], "min_tokens": 3}], ids=str
)
def test_what_the_mask_demands_is_drawn_whatever_else_bans_it(config: dict[str, Any]) -> None:
    assert draw(np.arange(10.0), mask_of([5], 10), temperature=0.0, **config)["token"] == 5


def test_bans_hold_as_far_as_the_mask_leaves_a_choice() -> None:
    assert draw(np.arange(10.0), mask_of([4, 5], 10), temperature=0.0, bad_words=[[5]])["token"] == 4


def test_an_empty_mask_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="may be drawn"):
        draw(np.arange(10.0), mask_of([], 10))


def test_masks_hold_what_they_are_told() -> None:
    mask = TokenMask(70)
    assert mask.num_bytes == 12
    assert not mask.allows_any
    mask.allow([0, 69])
    mask.ban([0])
    assert int.from_bytes(ctypes.string_at(mask.address, 12), "little") == 1 << 69
    mask.ban_all()
    assert not mask.allows_any
    with pytest.raises(IndexError):
        mask.allow([96])
    with pytest.raises(ValueError, match="at least 1"):
        TokenMask(0)


@pytest.fixture(scope="module")
def engine(demo_model: Path) -> ModelRunner:
    return runner.load_model(options.LoadOptions(str(demo_model), num_pages=400, threads=2))


def opened(engine: ModelRunner, tokens: list[int], **sampling: Any) -> int:
    slot = engine.sequences.open(tokens, len(tokens), **{"seed": 3, **sampling})
    assert engine.sequences.reserve(slot, len(tokens) + 8)
    return slot


def test_a_late_mask_delays_its_own_sequence_alone(engine: ModelRunner) -> None:
    tokens = [0, 5, 300, 301, 302]
    allowed = list(range(500, 600))
    [in_time] = engine.step([opened(engine, tokens)], [0], [5], [(0, mask_of(allowed, 2048))]).token_ids
    assert in_time in allowed
    late = mask_of(allowed, 2048)
    late.reset()
    slot, other = opened(engine, tokens), opened(engine, tokens)
    result = engine.step([slot, other], [0, 0], [5, 5], [(0, late)])
    assert result.token_ids[0] == -1
    assert result.token_ids[1] >= 0
    assert not result.errors
    assert engine.sequences.tokens(slot) == tokens
    late.publish()
    assert engine.step([slot, other], [4, 5], [1, 1], [(0, late)]).token_ids[0] == in_time


def test_who_is_alone_waits_for_the_mask(engine: ModelRunner) -> None:
    mask = mask_of([700], 2048)
    mask.reset()
    writer = threading.Timer(0.01, mask.publish)
    writer.start()
    slot = opened(engine, [0, 5, 300])
    tokens = [-1]
    while tokens == [-1]:  # a step waits for a while, and then the next one does
        start = 0 if tokens else 2
        tokens = engine.step([slot], [start], [3 - start], [(0, mask)]).token_ids
    assert tokens == [700]
    writer.join()


def others(engine: ModelRunner, result: _native.StepResult, index: int) -> list[int]:
    seen: list[int] = []

    def look_at(token: int) -> bool:
        seen.append(token)
        return False

    assert not engine.guess_again(result, index, look_at)
    return seen


@pytest.mark.parametrize("count", [1, 5, 140])  # 128 rows of logits are computed at once
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_who_draws_ahead_of_the_mask_draws_the_same(engine: ModelRunner, count: int, temperature: float) -> None:
    """Some guesses are refused, or all."""
    prompt, sequences = [0, 5, 300, 301, 302], engine.sequences

    def open_all() -> list[int]:
        return [opened(engine, prompt, seed=seed, logprobs=2, temperature=temperature) for seed in range(count)]

    ahead, behind = open_all(), open_all()
    guessed = engine.step(ahead, [0] * count, [5] * count, [(row, None) for row in range(count)])
    guesses = [[token, *others(engine, guessed, row)] for row, token in enumerate(guessed.token_ids)]
    assert [sequences.tokens(slot) for slot in ahead] == [[*prompt, token] for token in guessed.token_ids]
    assert all(len(set(tokens)) == len(tokens) <= (4 if temperature else 1) for tokens in guesses)
    banned = {token for row in range(count // 2 + 1) for token in guesses[row][: 4 - row % 4]}
    allowed = [token for token in range(400, 2048) if token not in banned]
    refused = [row for row, (token, *_) in enumerate(guesses) if token not in allowed]
    refused = [row for row in refused if not engine.guess_again(guessed, row, allowed.__contains__)]
    assert refused
    assert len(refused) < count or count == 1 or not temperature  # greedy ones all guess the same
    mask = mask_of(allowed, 2048)
    engine.redraw(guessed, [(row, mask) for row in refused])
    known = engine.step(behind, [0] * count, [5] * count, [(row, mask) for row in range(count)])
    assert guessed.token_ids == known.token_ids
    assert guessed.logprobs == known.logprobs
    assert [sequences.tokens(slot) for slot in ahead] == [[*prompt, token] for token in known.token_ids]
    if count < 100:
        rows = [5] * count, [1] * count
        assert engine.step(ahead, *rows).token_ids == engine.step(behind, *rows).token_ids
    for slot in ahead + behind:
        sequences.close(slot)


def test_only_who_drew_ahead_of_its_mask_draws_again(engine: ModelRunner) -> None:
    slot, mask = opened(engine, [0, 5, 300]), mask_of([700], 2048)
    result = engine.step([slot], [0], [3], [(0, None)])
    drawn = result.token_ids
    with pytest.raises(ValueError, match="can't be drawn again without a mask"):
        engine.redraw(result, [(0, None)])
    assert not engine.guess_again(result, 0, lambda _: False)
    assert result.token_ids == drawn
    engine.redraw(result, [(0, mask)])
    assert result.token_ids == [700]
    for index in (0, 1):
        with pytest.raises(ValueError, match=f"sequence {index} of the last step did not draw"):
            engine.redraw(result, [(index, mask)])
        with pytest.raises(ValueError, match=f"sequence {index} of the last step did not draw"):
            engine.guess_again(result, index, lambda _: True)
    assert engine.sequences.tokens(slot) == [0, 5, 300, 700]


def test_a_mask_that_allows_nothing_fails_its_own_sequence_alone(engine: ModelRunner) -> None:
    slots = [opened(engine, [0, 5, 300]), opened(engine, [0, 5, 301])]
    result = engine.step(slots, [0, 0], [3, 3], [(0, None), (1, None)])
    engine.redraw(result, [(0, mask_of([], 2048)), (1, mask_of([700], 2048))])
    assert result.token_ids == [-1, 700]
    assert list(result.errors) == [0]
    assert "ban them all" in result.errors[0]


@pytest.mark.parametrize("sampling", [{"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}, {"bad_words_token_ids": [[5]]}])
def test_who_does_not_draw_from_all_must_have_a_mask(engine: ModelRunner, sampling: dict[str, Any]) -> None:
    slot = opened(engine, [0, 5, 300], **sampling)
    assert not engine.sequences.draws_from_all(slot)
    with pytest.raises(ValueError, match="its mask must be known first"):
        engine.step([slot], [0], [3], [(0, None)])
    assert engine.step([slot], [0], [3], [(0, mask_of([700], 2048))]).token_ids == [700]
    assert engine.sequences.draws_from_all(opened(engine, [0, 5, 300], temperature=0.0, top_p=1.0))
