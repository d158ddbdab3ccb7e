"""Token constraints: samples under a mask, and steps with constrained sequences, some of which are late."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.engine_core.grammar.tokenizer import GrammarTokenizer
from quire.kernels import _native, options, runner
from quire.kernels.runner import Constraint, Matcher, ModelRunner, SamplingConfig, TokenMask
from quire.kernels.step import StepInput


def mask_of(allowed: list[int], num_tokens: int) -> TokenMask:
    mask = TokenMask(num_tokens)
    mask.allow(allowed)
    mask.publish()
    return mask


def sample(logits: np.ndarray, mask: TokenMask | None, position: int = 0, **config: Any) -> dict[str, Any]:
    return _native.sample(logits.astype(np.float32), [], 0, position, SamplingConfig(**config), mask)


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 64, 300, 4099])
def test_only_allowed_tokens_are_sampled_as_if_there_were_no_others(vocab_size: int) -> None:
    random = np.random.default_rng(vocab_size)
    for position in range(50):
        logits = random.normal(size=vocab_size)
        allowed = sorted(random.choice(vocab_size, size=random.integers(1, vocab_size + 1), replace=False).tolist())
        banned = np.where(np.isin(np.arange(vocab_size), allowed), logits, -np.inf)
        config = {"seed": 7, "top_p": 0.9 if position % 2 else 1.0, "logprobs": 1}
        got = sample(logits, mask_of(allowed, vocab_size), position, **config)
        first = sample(logits, None, position, **config)["token"]
        if position % 2:
            assert got["token"] == sample(banned, None, position, **config)["token"]
        elif first in allowed:
            assert got["token"] == first
        assert got["token"] in allowed
        raw = logits.astype(np.float32).astype(np.float64)
        expected = raw[got["token"]] - np.log(np.exp(raw).sum())
        assert got["logprob"] == pytest.approx(expected, abs=1e-4)  # of the model alone
        assert got["top_ids"] == [int(np.argmax(logits.astype(np.float32)))]


@pytest.mark.parametrize(
    ("allowed", "others", "most"),
    [([0, 2, 3, 5], 0, 16.3), ([2, 4, 5], 0, 13.8), ([4, 5], 0, 10.8), ([2, 4, 5], 90, 13.8)],
)
def test_rejection_sampling_leaves_the_distribution_as_it_is(allowed: list[int], others: int, most: float) -> None:
    """`most` is what chi squared reaches by chance once in a thousand times; with many others the mask decides."""
    logits, count = np.array([2.0, 1.0, 0.0, 1.5, -1.0, 0.5, *[1.0] * others]), 20_000
    counts = np.zeros(len(logits))
    for position in range(count):
        counts[sample(logits, mask_of(allowed, len(logits)), position, seed=1)["token"]] += 1
    expected = np.where(np.isin(np.arange(len(logits)), allowed), np.exp(logits), 0)
    expected *= count / expected.sum()
    assert counts.sum() == counts[allowed].sum()
    assert ((counts - expected)[allowed] ** 2 / expected[allowed]).sum() < most


def test_nearly_impossible_tokens_keep_their_relative_probabilities() -> None:
    """Less than 2^-40 of the total mass, which rejection sampling cannot tell apart."""
    logits = np.array([0.0, -30.0, -31.0, -32.0])
    counts = np.zeros(4)
    for position in range(4000):
        counts[sample(logits, mask_of([1, 2, 3], 4), position, seed=1)["token"]] += 1
    assert counts / 4000 == pytest.approx([0, 0.665, 0.245, 0.09], abs=0.03)


def test_a_greedy_sample_is_the_likeliest_allowed_token() -> None:
    logits = np.random.default_rng(4).normal(size=300)
    for allowed in ([7], [7, 8], list(range(200, 300)), list(range(300))):
        got = sample(logits, mask_of(allowed, 300), temperature=0.0, logprobs=3)
        assert got["token"] == max(allowed, key=lambda token: np.float32(logits[token]))
        assert got["top_ids"] == np.argsort(-logits)[:3].tolist()  # refused ones too: the model's own


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_few_allowed_tokens_are_sampled_like_many(temperature: float) -> None:
    """One part in eight of the vocabulary is looked at token by token, and what is more as a whole."""
    random = np.random.default_rng(5)
    for position in range(400):
        logits = np.append(random.normal(size=63), -1000.0)
        mask = mask_of(random.choice(63, size=8, replace=False).tolist(), 64)
        config = {"seed": 9, "temperature": temperature, "logprobs": 2}
        few, many = sample(logits, mask, position, **config), sample(logits[:63], mask, position, **config)
        assert few == many


def test_tokens_beyond_the_mask_are_banned() -> None:
    logits = np.arange(100.0)
    assert sample(logits, mask_of([3, 5], 40), temperature=0.0)["token"] == 5


def test_bits_beyond_the_vocabulary_mean_nothing() -> None:
    assert sample(np.arange(10.0), mask_of([3, 31], 32), temperature=0.0)["token"] == 3


@pytest.mark.parametrize(
    "config",
    [{"allowed_token_ids": [1, 2]}, {"bad_words_token_ids": [[5]]}, {"stop_token_ids": [5], "min_tokens": 3}],
    ids=str,
)
def test_the_mask_overrides_all_other_bans(config: dict[str, Any]) -> None:
    assert sample(np.arange(10.0), mask_of([5], 10), temperature=0.0, **config)["token"] == 5


def test_bans_hold_as_far_as_the_mask_leaves_a_choice() -> None:
    assert sample(np.arange(10.0), mask_of([4, 5], 10), temperature=0.0, bad_words_token_ids=[[5]])["token"] == 4


def test_an_empty_mask_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="may be sampled"):
        sample(np.arange(10.0), mask_of([], 10))


def test_masks_hold_the_tokens_that_were_allowed() -> None:
    mask = TokenMask(70)
    assert mask.token_ids == []
    mask.allow([69, 0])
    assert mask.token_ids == [0, 69]
    assert [token for token in range(99) if mask.allows(token)] == [0, 69]
    with pytest.raises(IndexError):
        mask.allow([96])
    with pytest.raises(ValueError, match="at least 1"):
        TokenMask(0)


@pytest.fixture(scope="module")
def engine(demo_model: Path) -> ModelRunner:
    return runner.load_model(options.LoadOptions(str(demo_model), num_pages=400, threads=2))


def opened(
    engine: ModelRunner,
    tokens: list[int],
    constraint: Constraint | TokenMask | None = None,
    cache_salt: str | None = None,
    **sampling: Any,
) -> int:
    config = SamplingConfig(**{"seed": 3, **sampling})
    slot = engine.sequences.open(tokens, len(tokens), sampling=config, constraint=constraint, cache_salt=cache_salt)
    assert engine.sequences.reserve(slot, len(tokens) + 8)
    return slot


def step(engine: ModelRunner, *arguments: Any) -> _native.StepResult:
    """A whole step: nothing is pending."""
    result = engine.run(StepInput(*arguments))
    collect_all(engine, result)
    return result


def collect_all(engine: ModelRunner, result: _native.StepResult) -> list[int]:
    """The rows, as they were collected."""
    collected: list[int] = []
    while spans := engine.collect_pending(result):
        collected += spans
        assert spans == {row: result.token_ids[row] for row in spans}
    assert result.pending == []
    return collected


def test_a_late_mask_delays_its_own_sequence_alone(engine: ModelRunner) -> None:
    tokens = [0, 5, 300, 301, 302]
    allowed = list(range(500, 600))
    [[in_time]] = step(engine, [opened(engine, tokens, constraint=mask_of(allowed, 2048))], [0], [5]).token_ids
    assert in_time in allowed
    late = mask_of(allowed, 2048)
    late.reset()
    slot, other = opened(engine, tokens, constraint=late), opened(engine, tokens)
    result = step(engine, [slot, other], [0, 0], [5, 5])
    assert result.token_ids[0] == []
    assert len(result.token_ids[1]) == 1
    assert not result.errors
    assert engine.sequences.tokens(slot) == tokens
    late.publish()
    assert step(engine, [slot, other], [4, 5], [1, 1]).token_ids[0] == [in_time]


def test_a_sequence_alone_waits_for_its_mask(engine: ModelRunner) -> None:
    mask = mask_of([700], 2048)
    mask.reset()
    writer = threading.Timer(0.01, mask.publish)
    writer.start()
    slot = opened(engine, [0, 5, 300], constraint=mask)
    span: list[int] = []
    start = 0
    while not span:  # a step waits for a while, and then the next one does
        [span] = step(engine, [slot], [start], [3 - start]).token_ids
        start = 2
    assert span == [700]
    writer.join()


@pytest.fixture(scope="module")
def grammar(demo_model: Path) -> Matcher:
    """Two tokens in a row, out of 100."""
    return Matcher(GrammarTokenizer(str(demo_model)).get(), "lark", "start: <[500-599]> <[500-599]>")


@pytest.mark.parametrize("count", [1, 5, 140])  # 128 rows of logits are computed at once
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.0}, {"top_p": 0.9}, {"top_k": 20}], ids=str)
def test_the_token_does_not_depend_on_when_the_mask_is_written(
    engine: ModelRunner, grammar: Matcher, count: int, sampling: dict[str, Any]
) -> None:
    """Ahead of the step, or by the thread that samples, if it needs it; every third sequence has no constraint."""
    prompt, sequences = [0, 5, 300, 301, 302], engine.sequences
    constrained = [row for row in range(count) if row % 3 != 1]
    answers = []
    for is_ahead in (False, True):
        constraints = {row: Constraint(grammar, 2048, []) for row in constrained}
        slots = [
            opened(engine, prompt, seed=row, logprobs=2, constraint=constraints.get(row), **sampling)
            for row in range(count)
        ]
        found = []
        for start, length in ((0, 5), (5, 1)):
            for constraint in constraints.values():
                if is_ahead and constraint.begin_mask():
                    constraint.write_mask()
            result = engine.run(StepInput(slots, [start] * count, [length] * count))
            pending = result.pending
            assert pending == [row for row in constrained if row >= count // 128 * 128]
            assert collect_all(engine, result) == pending
            found.append((result.token_ids, [result.logprobs(row) for row in range(count)]))
        assert all(constraint.is_complete for constraint in constraints.values())
        assert all(500 <= spans[row][0] < 600 for spans, _ in found for row in constrained)
        assert [sequences.tokens(slot) for slot in slots] == [
            [*prompt, *first, *second] for first, second in zip(*(spans for spans, _ in found), strict=True)
        ]
        answers.append(found)
        for slot in slots:
            sequences.close(slot)
    assert answers[0] == answers[1]


def test_a_step_is_collected_before_the_next(engine: ModelRunner, grammar: Matcher) -> None:
    slot = opened(engine, [0, 5, 300], constraint=Constraint(grammar, 2048, []))
    result = engine.run(StepInput([slot], [0], [3]))
    assert (result.token_ids, result.pending) == ([[]], [0])
    with pytest.raises(RuntimeError, match="pending of the last step"):
        engine.run(StepInput([slot], [3], [1]))
    collected = engine.collect_pending(result)
    [span] = result.token_ids
    assert collected == {0: span}
    assert engine.collect_pending(result) == {}
    assert result.token_ids == [span]
    assert engine.sequences.tokens(slot) == [0, 5, 300, *span]


def test_only_the_last_step_is_collected(engine: ModelRunner, grammar: Matcher) -> None:
    other = engine.run(StepInput([opened(engine, [0, 5, 300]), opened(engine, [0, 5, 301])], [0, 0], [3, 3]))
    result = engine.run(StepInput([opened(engine, [0, 5, 302], constraint=Constraint(grammar, 2048, []))], [0], [3]))
    with pytest.raises(ValueError, match=r"the result of step \d+ is not that of the last step"):
        engine.collect_pending(other)
    assert engine.collect_pending(result) == {0: result.token_ids[0]}
    assert 500 <= result.token_ids[0][0] < 600


def test_a_result_of_as_many_sequences_is_not_collected_either(engine: ModelRunner, grammar: Matcher) -> None:
    other = engine.run(StepInput([opened(engine, [0, 5, 300])], [0], [3]))
    result = engine.run(StepInput([opened(engine, [0, 5, 302], constraint=Constraint(grammar, 2048, []))], [0], [3]))
    with pytest.raises(ValueError, match="collect each result before the next step"):
        engine.collect_pending(other)
    assert (len(other.token_ids[0]), other.pending, result.pending) == (1, [], [0])
    assert engine.collect_pending(result) == {0: result.token_ids[0]}
    assert engine.collect_pending(result) == {}


def test_a_runner_ends_in_the_midst_of_sampling(demo_model: Path, grammar: Matcher) -> None:
    for count in (1, 8):
        runner_of_few = runner.load_model(options.LoadOptions(str(demo_model), num_pages=40, threads=2))
        slots = [opened(runner_of_few, [0, 5, 300], constraint=Constraint(grammar, 2048, [])) for _ in range(count)]
        runner_of_few.run(StepInput(slots, [0] * count, [3] * count))
        del runner_of_few


def test_a_mask_that_allows_nothing_fails_its_own_sequence_alone(engine: ModelRunner) -> None:
    slots = [opened(engine, [0, 5, 300 + row], constraint=mask_of([700] * row, 2048)) for row in range(2)]
    result = step(engine, slots, [0, 0], [3, 3])
    assert result.token_ids == [[], [700]]
    assert list(result.errors) == [0]
    assert "ban them all" in result.errors[0]


@pytest.mark.parametrize("is_constrained", [True, False])
def test_a_failed_sequence_leaves_nothing_in_the_prefix_cache(engine: ModelRunner, is_constrained: bool) -> None:
    """Its pages may hold what made it fail."""
    prompt = [0, *range(100, 163)]
    banned: dict[str, Any] = {"allowed_token_ids": [5], "bad_words_token_ids": [[5]]}
    fails = opened(engine, prompt, cache_salt="", **({"constraint": mask_of([], 2048)} if is_constrained else banned))
    assert list(step(engine, [fails], [0], [64]).errors) == [0]
    assert engine.sequences.shared(fails)[0] == 0
    fine = opened(engine, prompt, cache_salt="")
    assert not step(engine, [fine], [0], [64]).errors
    assert engine.sequences.shared(fine)[0] == 64
    for slot in (fails, fine):
        engine.sequences.close(slot)


def test_a_grammar_that_can_not_go_on_fails_its_own_sequence_alone(engine: ModelRunner, grammar: Matcher) -> None:
    constraints = [Constraint(grammar, 2048, []) for _ in range(2)]
    constraints[0].follow(7)
    slots = [opened(engine, [0, 5, 300 + row], constraint=each) for row, each in enumerate(constraints)]
    result = step(engine, slots, [0, 0], [3, 3])
    assert result.token_ids[0] == []
    assert 500 <= result.token_ids[1][0] < 600
    assert list(result.errors) == [0]
    assert "the grammar can't be followed any further" in result.errors[0]
