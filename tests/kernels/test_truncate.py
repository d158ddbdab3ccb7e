"""Tokens taken back: a truncated sequence goes on like one that never had them, and shared pages stay as they are."""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from quire.engine_core.grammar.tokenizer import GrammarTokenizer
from quire.kernels import options, runner
from quire.kernels.runner import Constraint, Matcher, ModelRunner, SamplingConfig, Sequences, TokenMask
from quire.kernels.step import StepInput

VOCAB = 2048
PENALTIES: dict[str, Any] = {"repetition_penalty": 1.3, "presence_penalty": 0.7, "frequency_penalty": 0.4}


@pytest.fixture(scope="module")
def engine(demo_model: Path) -> ModelRunner:
    return runner.load_model(options.LoadOptions(str(demo_model), num_pages=64, threads=2))


@pytest.fixture(scope="module")
def matcher(demo_model: Path) -> Matcher:
    return Matcher(
        GrammarTokenizer(str(demo_model)).get(), "lark", 'start: ("the quick fox " | /[a-z]{1,6}/ ", ")+ "the end"'
    )


def prompt_of(length: int) -> list[int]:
    choose = random.Random(length)
    return [choose.randrange(VOCAB) for _ in range(length)]


def extend(engine: ModelRunner, slot: int, start: int, num_tokens: int) -> list[Any]:
    """Step until there are so many tokens; return the log probabilities."""
    entries: list[Any] = []
    sequences = engine.sequences
    while (size := sequences.num_tokens(slot)) < num_tokens:
        assert sequences.reserve(slot, size)
        result = engine.run(StepInput([slot], [start], [size - start]))
        while engine.collect_pending(result):
            pass
        assert not result.errors
        assert result.token_ids[0]
        entries += result.logprobs(0) or []
        start = size
    return entries


@pytest.mark.parametrize("length", [1, 31, 32, 33, 60, 64, 95])
@pytest.mark.parametrize(
    "sampling",
    [
        {"logprobs": 2},
        {"temperature": 0.0, "logprobs": 1, **PENALTIES},
        {"min_tokens": 12, "stop_token_ids": [*range(1500)]},
    ],
    ids=str,
)
def test_a_truncated_sequence_goes_on_like_one_that_was_never_longer(
    engine: ModelRunner, length: int, sampling: dict[str, Any]
) -> None:
    """Its first answer, another one after a token that was appended, and what a new sequence says there."""
    sequences, prompt = engine.sequences, prompt_of(length)
    config = SamplingConfig(seed=5, **sampling)
    slot = sequences.open(prompt, length, sampling=config)
    first = extend(engine, slot, 0, length + 20)
    answer = sequences.tokens(slot)
    for kept in (19, 12, 7, 1, 0):
        assert sequences.truncate(slot, length + kept) == length + kept
        assert sequences.tokens(slot) == answer[: length + kept]
        assert len(sequences.pages(slot)) == -(-(length + kept) // engine.block_size)
        assert extend(engine, slot, length + kept - 1, length + 20) == first[kept:]
        assert sequences.tokens(slot) == answer
        sequences.truncate(slot, length + kept)
        sequences.append(slot, 77)
        other = extend(engine, slot, length + kept, length + 20)
        fresh = sequences.open([*answer[: length + kept], 77], length, sampling=config)
        assert extend(engine, fresh, 0, length + 20) == other
        assert sequences.tokens(fresh) == sequences.tokens(slot)
        sequences.close(fresh)
        sequences.truncate(slot, length)
        assert extend(engine, slot, length - 1, length + 20) == first
    sequences.close(slot)
    assert sequences.held_pages == 0


def test_a_page_that_others_have_too_is_given_back(engine: ModelRunner) -> None:
    """It would have to be written from its middle on. The fork and the prefix cache keep it."""
    sequences, prompt = engine.sequences, prompt_of(40)
    slot = sequences.open(prompt, 40, cache_salt="a")
    extend(engine, slot, 0, 100)
    tokens, pages = sequences.tokens(slot), sequences.pages(slot)
    fork = sequences.open(tokens, 40, cache_salt="a")
    assert engine.fork(fork, slot, 99, 100)
    before = extend(engine, fork, 99, 110), sequences.tokens(fork)
    assert sequences.truncate(slot, 80) == 64  # of 3 shared pages and one that is not
    assert sequences.pages(slot) == pages[:2]
    assert sequences.reserve(slot, 80)
    assert sequences.pages(slot)[2] not in {*pages, *sequences.pages(fork)}
    assert extend(engine, slot, 64, 100) == []
    assert sequences.tokens(slot) == tokens
    assert sequences.pages(slot)[2] == pages[2]  # the same tokens again: the prefix cache's page takes its place
    sequences.truncate(fork, 100)
    assert (extend(engine, fork, 99, 110), sequences.tokens(fork)) == before
    for each in (slot, fork):
        sequences.close(each)
    again = sequences.open(tokens, 40, cache_salt="a")
    assert sequences.start(again, 100) == 96
    assert extend(engine, again, 96, 110) == before[0]
    assert sequences.tokens(again) == before[1]
    sequences.close(again)
    sequences.tree.evict(64)
    assert sequences.free_pages == 64


def test_a_shared_page_is_not_rewritten_at_its_last_position(engine: ModelRunner) -> None:
    """The last token is computed again to sample after it; a token that is appended begins another page."""
    sequences, prompt = engine.sequences, prompt_of(40)
    slot = sequences.open(prompt, 40, cache_salt="a")
    extend(engine, slot, 0, 70)
    tokens, pages = sequences.tokens(slot), sequences.pages(slot)
    assert sequences.truncate(slot, 64, recompute_last=False) == 64
    assert sequences.pages(slot) == pages[:2]
    sequences.append(slot, tokens[64])
    extend(engine, slot, 64, 70)
    assert sequences.tokens(slot) == tokens
    assert sequences.truncate(slot, 64) == 32
    assert sequences.pages(slot) == pages[:1]
    extend(engine, slot, 32, 70)
    assert sequences.tokens(slot) == tokens
    assert sequences.truncate(slot, 65) == 65
    extend(engine, slot, 64, 70)
    assert sequences.tokens(slot) == tokens
    sequences.close(slot)
    sequences.tree.evict(64)
    assert sequences.free_pages == 64


@pytest.mark.parametrize("seed", range(6))
def test_a_grammar_goes_back_too(engine: ModelRunner, matcher: Matcher, seed: int) -> None:
    """From every place, the end included, and in the midst of forced tokens."""
    sequences, prompt = engine.sequences, prompt_of(9)
    constraint = Constraint(matcher, VOCAB, [1])
    slot = sequences.open(prompt, 9, sampling=SamplingConfig(seed=seed, temperature=1.5), constraint=constraint)

    def finish(start: int) -> None:
        while not constraint.has_ended and sequences.num_tokens(slot) < 50:
            size = sequences.num_tokens(slot)
            extend(engine, slot, start, size + 1)
            start = size

    finish(0)
    answer = sequences.tokens(slot)
    has_ended = constraint.has_ended
    choose = random.Random(seed)
    for kept in [len(answer) - 1, *(choose.randrange(9, len(answer)) for _ in range(12)), 9]:
        sequences.truncate(slot, kept)
        assert constraint.error is None
        finish(kept - 1)
        assert sequences.tokens(slot)[: len(answer)] == answer[: sequences.num_tokens(slot)]
        assert constraint.has_ended == has_ended
    sequences.close(slot)


def test_a_stop_token_is_taken_back(matcher: Matcher) -> None:
    """The grammar itself does not know of it."""
    sequences = Sequences(4, 32, VOCAB)
    constraint = Constraint(matcher, VOCAB, [1234])
    slot = sequences.open([1, 2], 2, constraint=constraint)
    before = constraint.mask.token_ids
    while not constraint.allows(1234):
        constraint.follow(constraint.mask.token_ids[0])
    after = constraint.mask.token_ids
    constraint.follow(1234)
    assert constraint.has_ended
    constraint.rollback(1)
    assert constraint.mask.token_ids == after
    constraint.restart()
    assert constraint.mask.token_ids == before
    sequences.close(slot)


def test_a_constraint_does_not_go_back_while_its_mask_is_written(matcher: Matcher) -> None:
    constraint = Constraint(matcher, VOCAB, [])
    constraint.follow(constraint.mask.token_ids[0])
    assert constraint.begin_mask()
    with pytest.raises(RuntimeError, match="another thread writes its mask"):
        constraint.rollback(1)
    constraint.write_mask()
    constraint.rollback(1)


def test_appended_tokens_are_none_of_the_constraint_s(matcher: Matcher) -> None:
    """Drafts that are taken back before a step: the constraint has not advanced past them."""
    constraint = Constraint(matcher, VOCAB, [])
    before = constraint.mask.token_ids
    sequences = Sequences(4, 32, VOCAB)
    slot = sequences.open([1, 2], 2, constraint=constraint)
    for token in (5, 6, 7):
        sequences.append(slot, token)
    assert sequences.truncate(slot, 3) == 0  # it has no pages
    assert sequences.tokens(slot) == [1, 2, 5]
    assert constraint.mask.token_ids == before


def test_a_constraint_does_not_go_back_further_than_it_has_come(matcher: Matcher) -> None:
    """The sequence was opened with outputs that the constraint does not know; nothing has changed."""
    constraint = Constraint(matcher, VOCAB, [])
    sequences = Sequences(4, 32, VOCAB)
    slot = sequences.open([1, 2, 3, 4, 5], 2, constraint=constraint)
    constraint.follow(constraint.mask.token_ids[0])
    before = constraint.mask.token_ids
    with pytest.raises(RuntimeError, match="cannot go back by 3 tokens; it has advanced past 1"):
        sequences.truncate(slot, 2)
    with pytest.raises(RuntimeError, match="cannot go back by -1 tokens"):
        constraint.rollback(-1)
    assert (sequences.tokens(slot), constraint.error, constraint.mask.token_ids) == ([1, 2, 3, 4, 5], None, before)
    sequences.truncate(slot, 4)
    assert constraint.error is None
    with pytest.raises(RuntimeError, match="it has advanced past 0"):
        constraint.rollback(1)
    sequences.close(slot)


@pytest.mark.parametrize("num_tokens", [0, 1, 6, -1])
def test_only_outputs_are_taken_back(num_tokens: int) -> None:
    sequences = Sequences(4, 32, VOCAB)
    slot = sequences.open([1, 2, 3, 4, 5], 2, constraint=TokenMask(VOCAB))
    with pytest.raises(ValueError, match=f"num_tokens={num_tokens} to keep of slot 0; it must be from 2"):
        sequences.truncate(slot, num_tokens)
    sequences.truncate(slot, 2)
    assert sequences.tokens(slot) == [1, 2]


class Model:
    """A sequence: its tokens and how many of them are in its pages."""

    def __init__(self, tokens: list[int], num_prompt_tokens: int, salt: str | None) -> None:
        self.tokens, self.num_prompt_tokens, self.salt = tokens, num_prompt_tokens, salt
        self.num_computed = 0


PAGE, PAGES = 4, 24


class TruncateMachine(RuleBasedStateMachine):
    """Sequences that grow, fork, share, are truncated and end, over KV memory that holds checksums.

    A position holds the checksum of all tokens up to it. What is written must lie in a page of the writer alone.
    """

    @initialize()
    def begin(self) -> None:
        self.sequences = Sequences(PAGES, PAGE, 100)
        self.memory: dict[tuple[int, int], int] = {}
        self.open: dict[int, Model] = {}

    def slots(self) -> list[int]:
        return sorted(self.open)

    def pick(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(self.slots()))

    def cells(self, slot: int, begin: int, end: int) -> Iterator[tuple[tuple[int, int], int]]:
        """Pages and places of positions, with the checksums that belong there."""
        tokens, pages = self.open[slot].tokens, self.sequences.pages(slot)
        for position in range(begin, end):
            yield (pages[position // PAGE], position % PAGE), zlib.crc32(repr(tokens[: position + 1]).encode())

    def check(self, slot: int) -> None:
        for cell, checksum in self.cells(slot, 0, self.open[slot].num_computed):
            assert self.memory[cell] == checksum

    def add(self, tokens: list[int], num_prompt_tokens: int, salt: str | None) -> int:
        slot = self.sequences.open(tokens, num_prompt_tokens, cache_salt=salt)
        self.open[slot] = Model(list(tokens), num_prompt_tokens, salt)
        return slot

    @precondition(lambda self: len(self.open) < 5)
    @rule(length=st.integers(1, 14), token=st.integers(0, 2), salt=st.sampled_from([None, "a"]))
    def open_one(self, length: int, token: int, salt: str | None) -> None:
        """Few different prompts, so that their beginnings are found."""
        slot = self.add([token] * length, max(1, length - 3), salt)
        found = self.sequences.start(slot, length)
        self.open[slot].num_computed = found or 0
        self.check(slot)

    @precondition(lambda self: self.open and len(self.open) < 5)
    @rule(data=st.data())
    def fork_one(self, data: st.DataObject) -> None:
        source = self.pick(data)
        model = self.open[source]
        if not model.num_computed:
            return
        count = data.draw(st.integers(1, model.num_computed))
        slot = self.add([*model.tokens[:count], 7], min(count, model.num_prompt_tokens), model.salt)
        if not self.sequences.fork(slot, source, count, count + 1):
            return
        full = count // PAGE * PAGE
        old, new = self.sequences.pages(source), self.sequences.pages(slot)
        for position in range(full, count):  # as Runner.fork does
            self.memory[new[position // PAGE], position % PAGE] = self.memory[old[position // PAGE], position % PAGE]
        self.open[slot].num_computed = count
        self.check(slot)

    @precondition(lambda self: self.open)
    @rule(data=st.data(), tokens=st.lists(st.integers(0, 2), min_size=1, max_size=6))
    def append(self, data: st.DataObject, tokens: list[int]) -> None:
        slot = self.pick(data)
        for token in tokens:
            self.sequences.append(slot, token)
            self.open[slot].tokens.append(token)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def compute(self, data: st.DataObject) -> None:
        slot = self.pick(data)
        model = self.open[slot]
        begin, end = model.num_computed, data.draw(st.integers(0, len(model.tokens)))
        if end <= begin or not self.sequences.reserve(slot, end):
            return
        others = {page for other in self.open if other != slot for page in self.sequences.pages(other)}
        for cell, checksum in self.cells(slot, begin, end):
            assert cell[0] not in others
            self.memory[cell] = checksum
        model.num_computed = end
        self.sequences.share(slot, end)
        self.check(slot)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        slot = self.pick(data)
        model = self.open[slot]
        kept = data.draw(st.integers(model.num_prompt_tokens, len(model.tokens)))
        recompute_last = data.draw(st.booleans())
        before = self.sequences.pages(slot)
        held = self.sequences.truncate(slot, kept, recompute_last=recompute_last)
        del model.tokens[kept:]
        model.num_computed = min(model.num_computed, held, kept - recompute_last)
        pages = self.sequences.pages(slot)
        assert pages == before[: len(pages)]
        written = (kept - recompute_last) // PAGE
        assert len(pages) in {min(len(before), -(-kept // PAGE)), min(len(before), written)}
        assert held == min(kept, len(pages) * PAGE)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        slot = self.pick(data)
        self.sequences.close(slot)
        del self.open[slot]

    @invariant()
    def pages_add_up_and_hold_what_they_should(self) -> None:
        held = {page for slot in self.open for page in self.sequences.pages(slot)}
        assert len(held) == self.sequences.held_pages
        assert self.sequences.free_pages + self.sequences.cached_pages + len(held) == PAGES
        for slot, model in self.open.items():
            assert self.sequences.tokens(slot) == model.tokens
            assert self.sequences.num_computed_tokens(slot) == model.num_computed
            self.check(slot)

    @invariant()
    def each_sequence_says_what_it_lacks(self) -> None:
        slots, models = self.slots(), [self.open[slot] for slot in self.slots()]
        lengths, computed = [len(model.tokens) for model in models], [model.num_computed for model in models]
        pages = [len(self.sequences.pages(slot)) for slot in slots]
        indices = range(len(slots))
        assert self.sequences.growing(slots) == [i for i in indices if lengths[i] > pages[i] * PAGE]
        assert self.sequences.prefilling(slots) == [
            i for i in indices if computed[i] < lengths[i] - 1 or computed[i] < models[i].num_prompt_tokens
        ]
        lacked = sum(max(-(-length // PAGE) - held, 0) for length, held in zip(lengths, pages, strict=True))
        assert self.sequences.pages_lacked(slots, lengths) == lacked

    def teardown(self) -> None:
        """The prefix cache holds what its tokens say."""
        for slot in self.slots():
            tokens, salt = self.open[slot].tokens, self.open[slot].salt
            self.sequences.close(slot)
            again = self.add([*tokens, 0], 1, salt)
            self.open[again].num_computed = self.sequences.start(again, 0) or 0
            self.check(again)
            self.sequences.close(again)
        assert self.sequences.held_pages == 0
        self.sequences.tree.evict(PAGES)
        assert self.sequences.free_pages == PAGES


TruncateMachine.TestCase.settings = settings(max_examples=200, stateful_step_count=30)
test_truncate_among_others = TruncateMachine.TestCase
