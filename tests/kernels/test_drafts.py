"""A step with drafts gives the tokens and log probabilities of steps without, however right the drafts are."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from quire.engine_core.grammar.tokenizer import GrammarTokenizer
from quire.kernels import options, runner
from quire.kernels.runner import Constraint, Matcher, ModelRunner, PoolingConfig, SamplingConfig, TokenMask
from quire.kernels.step import StepInput

VOCAB = 2048
LENGTH = 40  # tokens of an answer
PENALTIES: dict[str, Any] = {"repetition_penalty": 1.3, "presence_penalty": 0.7, "frequency_penalty": 0.4}
SAMPLING: list[dict[str, Any]] = [
    {"temperature": 0.0, "logprobs": 2},
    {"logprobs": 0},
    {"temperature": 0.7, "top_p": 0.9, "top_k": 30, "min_p": 0.01},
    {"temperature": 0.0, "logprobs": 1, **PENALTIES},
    {"temperature": 0.6, **PENALTIES},
    {"temperature": 0.5, "min_tokens": 20, "stop_token_ids": list(range(0, VOCAB, 2)), "logit_bias": [(5, 4.0)]},
    {"temperature": 0.8, "bad_words_token_ids": [[5], [7, 9]], "allowed_token_ids": list(range(60))},
]
GRAMMAR = r'start: ("the quick brown fox " | "a lazy dog; " | "it was " /[a-z]{1,8}/ ". ")+'

Answer = tuple[list[int], list[Any]]
Drafts = Callable[[list[int]], list[int]]
"""From the tokens that are going to be sampled to the drafts of them."""


@pytest.fixture(scope="module")
def engine(demo_model: Path) -> ModelRunner:
    return runner.load_model(options.LoadOptions(str(demo_model), num_pages=600, threads=2))


@pytest.fixture(scope="module")
def grammar(demo_model: Path) -> Matcher:
    matcher = Matcher(GrammarTokenizer(str(demo_model)).get(), "lark", GRAMMAR)
    assert matcher.error is None
    return matcher


def prompt_of(length: int) -> list[int]:
    choose = random.Random(length)
    return [choose.randrange(VOCAB) for _ in range(length)]


def wrong_after(num_right: int, num_drafts: int) -> Drafts:
    """The first `num_right` are right, and no other."""

    def drafts(following: list[int]) -> list[int]:
        return [token if i < num_right else (token + 1) % VOCAB for i, token in enumerate(following[:num_drafts])]

    return drafts


def at_random(seed: int) -> Drafts:
    choose = random.Random(seed)
    return lambda following: wrong_after(choose.randint(0, 6), choose.randint(0, 6))(following)


def none(_: list[int]) -> list[int]:
    return []


class Generation:
    """A sequence that is extended step by step, with drafts of the tokens that are `known` to follow."""

    def __init__(
        self,
        engine: ModelRunner,
        prompt: list[int],
        *,
        constraint: Constraint | TokenMask | None = None,
        cache_salt: str | None = None,
        known: list[int] | None = None,
        drafts: Drafts = none,
        branches: Sequence[Drafts] = (),
        **sampling: Any,
    ) -> None:
        self.engine, self.prompt, self.known, self.drafts = engine, prompt, known or [], drafts
        self.branches = branches
        self.constraint = constraint
        config = SamplingConfig(**{"seed": 3, **sampling})
        self.slot = engine.sequences.open(
            prompt, len(prompt), sampling=config, constraint=constraint, cache_salt=cache_salt
        )
        self.num_computed = 0
        self.entries: list[Any] = []
        self.spans: list[list[int]] = []

    @property
    def answer(self) -> list[int]:
        return self.engine.sequences.tokens(self.slot)[len(self.prompt) :]

    def chunk(self) -> tuple[int, int, int, int]:
        """Append drafts, and return the arguments of the next step."""
        drafts = self.drafts(self.known[len(self.answer) :]) if self.num_computed else []
        for token in drafts:
            self.engine.sequences.append(self.slot, token)
        size = self.engine.sequences.num_tokens(self.slot)
        assert self.engine.sequences.reserve(self.slot, size)
        return self.slot, self.num_computed, size - self.num_computed, len(drafts)

    def paths(self) -> list[list[int]]:
        """Return the branches beside the drafts of the next step."""
        following = self.known[len(self.answer) :]
        return [path for branch in self.branches if self.num_computed and (path := branch(following))]

    def take(self, span: list[int], entries: list[Any] | None, end: int) -> None:
        """Take the outcome of a step that has computed the tokens before `end`."""
        assert span
        self.spans.append(span)
        assert self.answer == [token for each in self.spans for token in each]
        self.entries += entries or []
        self.num_computed = min(self.engine.sequences.num_tokens(self.slot) - 1, end)
        assert self.engine.sequences.num_computed_tokens(self.slot) == self.num_computed

    def finish(self, num_tokens: int = LENGTH) -> Answer:
        """Step until there are so many tokens, or the grammar ends."""
        while len(self.answer) < num_tokens and not (
            isinstance(self.constraint, Constraint) and self.constraint.has_ended
        ):
            step(self.engine, [self])
        answer = self.answer[:num_tokens], self.entries[:num_tokens]
        self.engine.sequences.close(self.slot)
        return answer


def step(engine: ModelRunner, generations: list[Generation]) -> None:
    paths = [each.paths() for each in generations]
    chunks = [each.chunk() for each in generations]
    slots, starts, counts, num_drafts = (list(column) for column in zip(*chunks, strict=True))
    branches = [(row, path) for row, each in enumerate(paths) if num_drafts[row] for path in each]
    result = engine.run(StepInput(slots, starts, counts, num_drafts, branches))
    while engine.collect_pending(result):
        pass
    assert not result.errors
    for row, (each, start, count) in enumerate(zip(generations, starts, counts, strict=True)):
        each.take(result.token_ids[row], result.logprobs(row), start + count)


def generate(engine: ModelRunner, prompt: list[int], **chosen: Any) -> Answer:
    return Generation(engine, prompt, **chosen).finish()


@pytest.mark.parametrize("sampling", SAMPLING, ids=str)
def test_drafts_change_no_token_and_no_logprob(engine: ModelRunner, sampling: dict[str, Any]) -> None:
    """All right, partly right, all wrong, or as it happens; the prompt ends at every place around a page's end."""
    for length in (1, 30, 31, 32, 33, 63, 64, 90):
        prompt = prompt_of(length)
        expected = generate(engine, prompt, **sampling)
        more = [*expected[0], *prompt_of(9)]
        for drafts in (wrong_after(5, 5), wrong_after(2, 5), wrong_after(0, 3), at_random(1), at_random(2)):
            assert generate(engine, prompt, known=more, drafts=drafts, **sampling) == expected


@pytest.mark.parametrize("sampling", SAMPLING, ids=str)
def test_branches_change_no_token_and_no_logprob(engine: ModelRunner, sampling: dict[str, Any]) -> None:
    """Trees in which any path may be right, as far as it is; the answers of several at a time."""
    prompts = [prompt_of(length) for length in (1, 30, 31, 32, 33, 63)]
    expected = [generate(engine, prompt, **sampling) for prompt in prompts]
    for seed in range(3):
        trees = [at_random(10 * seed + number) for number in range(3)]
        generations = [
            Generation(
                engine, prompt, known=[*known, *prompt_of(9)], drafts=at_random(seed), branches=trees, cache_salt="t",
                **sampling,
            )
            for prompt, (known, _) in zip(prompts, expected, strict=True)
        ]  # fmt: skip
        while going := [each for each in generations if len(each.answer) < LENGTH]:
            step(engine, going)
        assert [(each.answer[:LENGTH], each.entries[:LENGTH]) for each in generations] == expected
        for each in generations:
            engine.sequences.close(each.slot)
    assert engine.sequences.held_pages == 0


def test_the_longest_path_is_kept(engine: ModelRunner) -> None:
    """Its rows are those that the step tells of."""
    prompt = prompt_of(30)
    known, _ = generate(engine, prompt, temperature=0.0)
    for num_right in ((1, 3, 2), (3, 1, 0), (0, 0, 4), (2, 2, 2)):
        chain, *branches = [wrong_after(right, 4) for right in num_right]
        generation = Generation(engine, prompt, known=known, drafts=chain, branches=branches, temperature=0.0)
        for _ in range(4):
            step(engine, [generation])
        assert [len(span) for span in generation.spans] == [1] + 3 * [max(num_right) + 1]
        engine.sequences.close(generation.slot)
    generation = Generation(engine, prompt, known=known, temperature=0.0)
    step(engine, [generation])
    for token in wrong_after(1, 2)(known[1:]):
        engine.sequences.append(generation.slot, token)
    assert engine.sequences.reserve(generation.slot, 33)
    result = engine.run(StepInput([generation.slot], [30], [3], [2], [(0, [5, 6]), (0, known[1:4])]))
    assert (result.token_ids, result.first_rows) == ([known[1:5]], [3 + 3])
    engine.sequences.close(generation.slot)


def test_a_branch_without_pages_is_left_out(demo_model: Path) -> None:
    engine = runner.load_model(options.LoadOptions(str(demo_model), num_pages=2, threads=1))
    prompt = prompt_of(40)
    known, _ = Generation(engine, prompt, temperature=0.0).finish(12)
    generation = Generation(engine, prompt, known=known, temperature=0.0, drafts=wrong_after(0, 2))
    generation.branches = [wrong_after(2, 2)]
    for _ in range(3):
        step(engine, [generation])
    assert [len(span) for span in generation.spans] == [1, 1, 1]
    assert (engine.sequences.free_pages, engine.sequences.held_pages) == (0, 2)
    engine.sequences.close(generation.slot)


def test_branches_that_can_not_be(engine: ModelRunner) -> None:
    """Of no sequence, without drafts, under a constraint, empty, or of more tokens than a step computes."""
    mask = TokenMask(VOCAB)
    slots = [engine.sequences.open([1, 2, 3], 2, constraint=each) for each in (None, None, mask)]
    for slot in slots:
        assert engine.sequences.reserve(slot, 3)
    for branch in ((3, [1]), (-1, [1]), (1, [1]), (2, [1]), (0, []), (0, [1] * 128)):
        with pytest.raises(ValueError, match="a branch of"):
            engine.run(StepInput(slots, [1, 1, 1], [2, 2, 2], [1, 0, 1], [branch]))
    with pytest.raises(ValueError, match="token id 2048 of a branch"):
        engine.run(StepInput(slots, [1, 1, 1], [2, 2, 2], [1, 0, 0], [(0, [VOCAB])]))
    with pytest.raises(ValueError, match="exceeds max_num_batched_tokens"):
        engine.run(StepInput(slots, [1, 1, 1], [2, 2, 2], [1, 0, 0], [(0, [1] * 100)] * 30))
    for slot in slots:
        engine.sequences.close(slot)
    assert engine.sequences.held_pages == 0


def test_right_drafts_are_all_accepted(engine: ModelRunner) -> None:
    prompt = prompt_of(50)
    known, _ = generate(engine, prompt, temperature=0.0)
    for num_right in range(5):
        generation = Generation(engine, prompt, known=known, drafts=wrong_after(num_right, 5), temperature=0.0)
        for _ in range(4):
            step(engine, [generation])
        assert [len(span) for span in generation.spans] == [1] + 3 * [num_right + 1]
        engine.sequences.close(generation.slot)


@pytest.mark.parametrize("sampling", [{}, {"logprobs": 1}, {"temperature": 0.0}, {"top_p": 0.9}], ids=str)
def test_drafts_under_a_grammar(engine: ModelRunner, grammar: Matcher, sampling: dict[str, Any]) -> None:
    """Forced tokens come in the spans, unless logprobs are asked for, and are compared with the drafts too."""
    for length in (3, 31, 32, 60):
        prompt = prompt_of(length)
        stops = [int(length % 2)]
        expected = generate(engine, prompt, constraint=Constraint(grammar, VOCAB, stops), seed=length, **sampling)
        known = [*expected[0], *prompt_of(9)]
        for drafts in (wrong_after(4, 4), wrong_after(1, 5), wrong_after(0, 2), at_random(3), at_random(4)):
            constraint = Constraint(grammar, VOCAB, stops)
            chosen = {"known": known, "drafts": drafts, "seed": length, **sampling}
            assert generate(engine, prompt, constraint=constraint, **chosen) == expected


def test_forced_tokens_come_in_the_span(engine: ModelRunner, grammar: Matcher) -> None:
    """With logprobs each is sampled, and gives the same token."""
    prompt = prompt_of(20)
    plain = Generation(engine, prompt, constraint=Constraint(grammar, VOCAB, []))
    tokens, _ = plain.finish()
    told, entries = generate(engine, prompt, constraint=Constraint(grammar, VOCAB, []), logprobs=0)
    assert any(len(span) > 4 for span in plain.spans)
    assert tokens == told == [entry[0][0] for entry in entries]


def test_the_end_of_a_grammar_ends_the_span(engine: ModelRunner, demo_model: Path) -> None:
    matcher = Matcher(GrammarTokenizer(str(demo_model)).get(), "lark", "start: <[500-599]> <[500-599]>")
    known, _ = generate(engine, [5, 6], constraint=Constraint(matcher, VOCAB, []))
    assert len(known) == 2
    for drafts in (known, [*known, 7, 8], [known[0], 7]):
        constraint = Constraint(matcher, VOCAB, [])
        generation = Generation(engine, [5, 6], constraint=constraint)
        generation.num_computed = 1
        engine.sequences.reserve(generation.slot, 2)
        assert not engine.run(StepInput([generation.slot], [0], [1])).pending
        generation.known, generation.drafts = drafts, lambda following: following
        step(engine, [generation])
        assert (generation.spans, constraint.is_complete) == ([known], True)
        engine.sequences.close(generation.slot)


def test_many_rows_of_logits_in_one_step(engine: ModelRunner, grammar: Matcher) -> None:
    """More than are computed at once, of all kinds of sequences; a sequence's rows stay together."""
    kinds = [{"seed": row, **SAMPLING[row % len(SAMPLING)]} for row in range(45)]

    def opened(row: int, **chosen: Any) -> Generation:
        constraint = Constraint(grammar, VOCAB, []) if row % 4 == 3 else None
        return Generation(engine, prompt_of(10 + row), constraint=constraint, **kinds[row], **chosen)

    expected = [opened(row).finish(12) for row in range(len(kinds))]
    generations = [
        opened(row, known=[*tokens, *prompt_of(9)], drafts=at_random(row) if row % 5 else wrong_after(6, 6))
        for row, (tokens, _) in enumerate(expected)
    ]
    while going := [each for each in generations if len(each.answer) < 12]:
        step(engine, going)
    assert [(each.answer[:12], each.entries[:12]) for each in generations] == expected
    for each in generations:
        engine.sequences.close(each.slot)


def test_rejected_drafts_do_not_enter_the_prefix_cache(engine: ModelRunner) -> None:
    """Others find pages of accepted tokens alone, with the bits that they would have computed."""
    prompt = prompt_of(57)
    expected = generate(engine, prompt, logprobs=1)
    drafts = wrong_after(3, 20)
    for _ in range(2):  # the second one begins with what the first one has left
        generation = Generation(engine, prompt, cache_salt="drafts", known=expected[0], drafts=drafts, logprobs=1)
        generation.num_computed = engine.sequences.start(generation.slot, len(prompt)) or 0
        assert generation.finish() == expected
    follower = Generation(engine, [*prompt, *expected[0]], cache_salt="drafts", logprobs=1)
    assert engine.sequences.start(follower.slot, 97) == 96
    follower.num_computed = 96
    assert follower.finish(5) == Generation(engine, [*prompt, *expected[0]], logprobs=1).finish(5)
    assert engine.sequences.held_pages == 0
    engine.sequences.tree.evict(600)
    assert engine.sequences.free_pages == 600


def test_a_failure_after_an_accepted_draft_is_the_next_step_s(engine: ModelRunner) -> None:
    """As without drafts: first come the tokens, then the error."""
    sampling = SamplingConfig(allowed_token_ids=[5], bad_words_token_ids=[[5, 5, 5]])
    slot = engine.sequences.open([9, 8], 2, sampling=sampling)
    for token in (5, 5, 5):
        engine.sequences.append(slot, token)
    assert engine.sequences.reserve(slot, 8)
    result = engine.run(StepInput([slot], [0], [5], [3]))
    assert (result.token_ids, result.errors) == ([[5, 5]], {})
    assert engine.sequences.tokens(slot) == [9, 8, 5, 5]
    result = engine.run(StepInput([slot], [3], [1]))
    assert result.token_ids == [[]]
    assert "may be sampled" in result.errors[0]
    engine.sequences.close(slot)


def test_a_failure_at_the_first_draft_leaves_none(engine: ModelRunner) -> None:
    """Their penalties are gone too, so the sequence is as it was before."""
    choices: dict[str, Any] = {"allowed_token_ids": [5], **PENALTIES}
    slot = engine.sequences.open([9, 8], 2, sampling=SamplingConfig(bad_words_token_ids=[[5, 5]], **choices))
    for token in (5, 5, 5):
        engine.sequences.append(slot, token)
    assert engine.sequences.reserve(slot, 8)
    result = engine.run(StepInput([slot], [0], [5], [2]))
    assert (result.token_ids, list(result.errors)) == ([[]], [0])
    assert engine.sequences.tokens(slot) == [9, 8, 5]
    assert engine.sequences.truncate(slot, 2) == 2
    engine.sequences.close(slot)


def test_a_late_mask_leaves_the_sequence_without_drafts(engine: ModelRunner) -> None:
    mask = TokenMask(VOCAB)
    mask.allow([700])
    slot = engine.sequences.open([9, 8], 2, constraint=mask, sampling=SamplingConfig(**PENALTIES))
    other = engine.sequences.open([9, 8], 2)
    for each, size in ((slot, 4), (other, 2)):
        assert engine.sequences.reserve(each, size)
    for token in (700, 7):
        engine.sequences.append(slot, token)
    result = engine.run(StepInput([other, slot], [0, 0], [2, 4], [0, 2]))
    assert (result.pending, engine.collect_pending(result), result.token_ids[1]) == ([1], {1: []}, [])
    assert engine.sequences.tokens(slot) == [9, 8]
    mask.publish()
    engine.sequences.append(slot, 700)
    result = engine.run(StepInput([slot], [1], [2], [1]))
    assert engine.collect_pending(result) == {0: [700, 700]}
    assert result.token_ids == [[700, 700]]
    for each in (slot, other):
        engine.sequences.close(each)


@pytest.mark.parametrize(
    ("num_tokens", "start", "count", "num_drafts"),
    [(4, 0, 4, 4), (4, 2, 2, 2), (4, 0, 3, 1), (4, 0, 4, -1), (2, 0, 2, 1), (200, 2, 198, 128)],
)
def test_drafts_that_can_not_be(engine: ModelRunner, num_tokens: int, start: int, count: int, num_drafts: int) -> None:
    """More than the chunk or the answer has, before the end, below zero, or more than a step's rows of logits."""
    slot = engine.sequences.open(prompt_of(num_tokens), 2)
    assert engine.sequences.reserve(slot, num_tokens)
    with pytest.raises(ValueError, match=f"num_drafts={num_drafts} "):
        engine.run(StepInput([slot], [start], [count], [num_drafts]))
    with pytest.raises(ValueError, match="differ in length"):
        engine.run(StepInput([slot], [start], [count], [0, 0]))
    engine.sequences.close(slot)


def test_a_prompt_that_is_pooled_has_no_drafts(engine: ModelRunner) -> None:
    slot = engine.sequences.open([1, 2, 3], 2, pooling=PoolingConfig())
    assert engine.sequences.reserve(slot, 3)
    with pytest.raises(ValueError, match="is pooled"):
        engine.run(StepInput([slot], [0], [3], [1]))
    engine.sequences.close(slot)
