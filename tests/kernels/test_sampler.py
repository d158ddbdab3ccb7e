"""The sampler agrees with a float64 reference, reports the model's own log probabilities, and rejects nonsense."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from sampler_reference import Case, check_sample, processed_logits, random_case

from quire.kernels import _native
from quire.kernels._native import SamplingConfig


def sample_token(logits: list[float], tokens: list[int] | None = None, prompt: int = 0, **config: Any) -> int:
    """Return the token sampled after `tokens`."""
    tokens = tokens or []
    return int(Case(np.array(logits, np.float32), tokens, prompt, len(tokens), config).sample()["token"])


@pytest.mark.parametrize("vocab_size", [1, 7, 63, 64, 65, 300, 4099])
def test_samples_equal_the_float64_reference(vocab_size: int) -> None:
    random = np.random.default_rng(vocab_size)
    checked = 0
    for _ in range(400):
        case = random_case(random, vocab_size)
        if np.isneginf(processed_logits(case)).all():
            with pytest.raises(RuntimeError, match="may be sampled"):
                case.sample()
            continue
        check_sample(case)
        checked += 1
    assert checked > 50


def test_samples_from_a_large_vocabulary_equal_the_float64_reference() -> None:
    random = np.random.default_rng(0)
    for _ in range(20):
        case = random_case(random, 151_936)
        if not np.isneginf(processed_logits(case)).all():
            check_sample(case)


@pytest.mark.parametrize(
    ("config", "kept"),
    [({}, 8), ({"top_k": 6}, 6), ({"top_p": 0.75}, 3), ({"min_p": 0.1}, 5), ({"temperature": 0.5}, 8)],
)
def test_frequencies_follow_the_probabilities(config: dict[str, Any], kept: int) -> None:
    logits = np.linspace(-2, 2, 8, dtype=np.float32)  # probabilities 0.44, 0.25, 0.14, 0.08, 0.04 ... from the last
    tokens = [
        _native.sample(logits, [], 0, position, SamplingConfig(seed=3, **config))["token"] for position in range(20_000)
    ]
    weights = np.exp(logits.astype(np.float64) / config.get("temperature", 1.0))[-kept:]
    expected = weights / weights.sum() * len(tokens)
    counts = np.bincount(tokens, minlength=8)
    assert counts[:-kept].sum() == 0
    assert ((counts[-kept:] - expected) ** 2 / expected).sum() < 35  # chi-squared of 7 degrees: once in 10^5


def test_a_draw_depends_on_seed_and_position_only() -> None:
    logits = np.random.default_rng(1).standard_normal(1000).astype(np.float32)
    config = SamplingConfig(seed=2**63 + 5, temperature=1.3, top_p=0.9)
    tokens = [_native.sample(logits, [], 0, position, config)["token"] for position in range(50)]
    again = [_native.sample(logits, [1, 2], 1, position, config)["token"] for position in reversed(range(50))]
    assert tokens == again[::-1]
    config.seed = 6
    other = [_native.sample(logits, [], 0, position, config)["token"] for position in range(50)]
    assert tokens != other


def test_greedy_takes_the_lowest_of_equal_tokens() -> None:
    assert sample_token([0.0, 3.0, 3.0, 1.0], temperature=0.0) == 1
    assert sample_token([-0.0, 0.0], temperature=0.0) == 0
    assert sample_token([-1.0] * 100 + [5.0] * 100, temperature=0.0) == 100


def test_top_k_and_top_p_break_ties_by_the_lower_id() -> None:
    flat = [1.0] * 200
    assert {sample_token(flat, seed=seed, top_k=3) for seed in range(100)} == {0, 1, 2}
    assert {sample_token(flat, seed=seed, top_p=0.015) for seed in range(100)} == {0, 1, 2}
    assert {sample_token(flat, seed=seed, top_p=1e-9) for seed in range(10)} == {0}


def test_top_p_is_taken_of_what_top_k_leaves() -> None:
    logits = np.log([0.4, 0.3, 0.2, 0.1]).tolist()
    assert {sample_token(logits, seed=seed, top_k=2, top_p=0.55) for seed in range(200)} == {0}  # 4/7 of what is left
    assert {sample_token(logits, seed=seed, top_p=0.55) for seed in range(200)} == {0, 1}


def test_repetition_penalty_counts_the_prompt_and_the_others_do_not() -> None:
    logits, tokens = [2.0, 1.9, -5.0], [0, 0]
    assert sample_token(logits, tokens, 2, temperature=0.0, repetition_penalty=1.2) == 1
    assert sample_token(logits, tokens, 2, temperature=0.0, presence_penalty=1.0, frequency_penalty=1.0) == 0
    assert sample_token(logits, tokens, 0, temperature=0.0, presence_penalty=1.0) == 1
    assert sample_token(logits, tokens, 0, temperature=0.0, frequency_penalty=0.06) == 1
    assert sample_token(logits, tokens, 1, temperature=0.0, frequency_penalty=0.06) == 0
    assert sample_token([-1.0, -1.1], [0], 0, temperature=0.0, repetition_penalty=1.2) == 1  # below zero it multiplies


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_penalty_that_overflows_neither_fails_nor_bans(temperature: float) -> None:
    tiny, huge = 1e-38, 3e38
    assert sample_token([9.0, 8.0, 1.0], [2], 1, temperature=temperature, repetition_penalty=tiny) == 2
    assert sample_token([-9.0, -8.0], [0, 1], 2, temperature=0.0, repetition_penalty=huge) == 0  # equally unlikely
    assert sample_token([-9.0, -8.0], [0], 1, temperature=temperature, repetition_penalty=huge) == 1
    only = {"temperature": temperature, "allowed_token_ids": [0], "repetition_penalty": huge}
    assert sample_token([-9.0, 8.0], [0, 0], 1, **only, frequency_penalty=2.0, presence_penalty=2.0) == 0
    biased = {"temperature": temperature, "logit_bias": [(1, 100.0), (2, -100.0)], "bad_words_token_ids": [[1]]}
    assert sample_token([3e38, 3e38, -3e38], [], 0, **biased) == 0  # a bias does not lift a ban


def test_a_bad_word_is_banned_where_it_would_be_completed() -> None:
    logits, word = [9.0, 1.0, 0.0], [[1, 2, 0]]
    assert sample_token(logits, [1, 2], 0, temperature=0.0, bad_words_token_ids=word) == 1
    assert sample_token(logits, [2, 2], 0, temperature=0.0, bad_words_token_ids=word) == 0
    assert sample_token(logits, [1, 2], 1, temperature=0.0, bad_words_token_ids=word) == 0  # begun in the prompt
    assert sample_token(logits, [], 0, temperature=0.0, bad_words_token_ids=[[0]]) == 1


def test_stop_tokens_are_banned_until_min_tokens_are_out() -> None:
    stop = {"temperature": 0.0, "stop_token_ids": [0], "min_tokens": 2}
    assert sample_token([9.0, 1.0], [1, 1, 1], 2, **stop) == 1
    assert sample_token([9.0, 1.0], [1, 1, 1], 1, **stop) == 0


@pytest.mark.parametrize("vocab_size", [5, 64, 1000, 151_936])
def test_logprobs_are_those_of_the_raw_logits(vocab_size: int) -> None:
    random = np.random.default_rng(vocab_size)
    logits = (4 * random.standard_normal(vocab_size)).astype(np.float32)
    top = min(vocab_size, 20)
    config = SamplingConfig(logprobs=top, temperature=0.5, logit_bias=[(3, 50.0)], allowed_token_ids=[1, 3], seed=1)
    result = _native.sample(logits, [0], 1, 1, config)
    exact = logits.astype(np.float64) - logits.max()
    exact -= np.log(np.exp(exact).sum())
    order = np.argsort(-exact, kind="stable")
    assert result["token"] == 3
    assert result["logprob"] == pytest.approx(exact[3], abs=2e-6)
    assert order[result["rank"] - 1] == 3
    assert result["top_ids"] == order[:top].tolist()
    np.testing.assert_allclose(result["top_logprobs"], exact[order[:top]], atol=3e-6)
    assert _native.token_logprobs(logits, 3, top) == result


def test_no_logprobs_unless_asked() -> None:
    logits = np.zeros(4, np.float32)
    assert _native.sample(logits, [], 0, 0, SamplingConfig())["logprob"] is None
    result = _native.sample(logits, [], 0, 0, SamplingConfig(logprobs=0, temperature=0.0))
    assert result == {"token": 0, "logprob": pytest.approx(np.log(0.25)), "rank": 1, "top_ids": [], "top_logprobs": []}


def test_all_of_the_vocabulary_may_be_asked_for() -> None:
    logits = np.random.default_rng(2).standard_normal(3000).astype(np.float32)
    assert sorted(_native.token_logprobs(logits, 0, 3000)["top_ids"]) == list(range(3000))


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf])
@pytest.mark.parametrize("place", [0, 63, 64, 99])
def test_a_logit_that_is_no_number_is_named(bad: float, place: int) -> None:
    logits = np.zeros(100, np.float32)
    logits[place] = bad
    for config in (SamplingConfig(), SamplingConfig(temperature=0.0), SamplingConfig(allowed_token_ids=[5])):
        with pytest.raises(RuntimeError, match=f"logit of token {place} is"):
            _native.sample(logits, [], 0, 0, config)


def test_banning_every_token_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="none of the 2 tokens may be sampled"):
        sample_token([1.0, 2.0], bad_words_token_ids=[[0], [1]])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("logit_bias", [(4, 1.0)]),
        ("allowed_token_ids", [-1]),
        ("bad_words_token_ids", [[]]),
        ("bad_words_token_ids", [[0, 4]]),
        ("stop_token_ids", [9]),
        ("logprobs", 5),
        ("logprobs", -2),
        ("prompt_logprobs", 5),
    ],
)
def test_token_ids_and_counts_outside_the_vocabulary_are_rejected(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=field):
        sample_token([0.0, 1.0, 2.0, 3.0], **{field: value})


def test_extreme_values_are_harmless() -> None:
    logits = [0.0, 3e38, -3e38, float("-inf"), 1e-45]
    for temperature in (1e-4, 1.0, 3e38):
        for top_p in (1.0, 0.9):
            assert sample_token(logits, temperature=temperature, top_p=top_p, seed=4) in {0, 1, 2, 4}
    assert sample_token([1.0, 1.0 + 2**-20], temperature=1e-6) == 1


def test_philox_gives_the_published_numbers() -> None:
    """The known answers of Random123 for philox4x32 with 10 rounds."""
    ones = 0xFFFFFFFF
    pi = ([0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344], [0xA4093822, 0x299F31D0])
    assert _native.philox_block([0] * 4, [0] * 2) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert _native.philox_block([ones] * 4, [ones] * 2) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
    assert _native.philox_block(*pi) == [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]


def test_uniform_numbers_are_those_of_the_counter() -> None:
    seed, position, index = 2**64 - 3, 2**33 + 7, 5
    low, high, *_ = _native.philox_block([position % 2**32, position >> 32, index, 0], [seed % 2**32, seed >> 32])
    assert _native.philox(seed, position, index) == ((high << 32 | low) >> 11) / 2**53
    numbers = np.array([_native.philox(1, position, 0) for position in range(20_000)])
    assert numbers.min() >= 0
    assert numbers.max() < 1
    assert abs(numbers.mean() - 0.5) < 0.01
