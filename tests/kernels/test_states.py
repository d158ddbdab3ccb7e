"""States of sequences: a step reads what was written after the tokens before its own, and records add up."""

from __future__ import annotations

import zlib
from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from quire.kernels._native import Sequences, StateShape, StateStore

PAGE, PAGES = 4, 24
RECORD_BYTES = 68
ZEROS = -1  # in the place of a record


def state_after(tokens: Iterable[int]) -> int:
    return zlib.crc32(repr([*tokens]).encode())


def states_of(sequences: Sequences) -> StateStore:
    assert sequences.states is not None
    return sequences.states


def read(sequences: Sequences, record: int) -> int:
    [state] = np.unique(states_of(sequences).record(record).view(np.uint32))
    return int(state)


def compute(sequences: Sequences, slot: int, start: int, end: int, certain: int | None = None) -> list[int]:
    """Write states as the kernels of a step do; return the lengths at which they were written."""
    tokens = sequences.tokens(slot)
    source, writes = sequences.write_states(slot, start, end, end if certain is None else certain)
    assert (source == ZEROS) == (start == 0)
    assert source == ZEROS or read(sequences, source) == state_after(tokens[:start])
    assert len({record for _, record in writes}) == len(writes)
    for length, record in writes:
        states_of(sequences).record(record).view(np.uint32)[:] = state_after(tokens[:length])
    lengths = [length for length, _ in writes]
    assert lengths == sorted(lengths)
    return lengths


class SequenceModel:
    """A sequence, as far as it is computed."""

    def __init__(self, tokens: list[int], salt: str | None) -> None:
        self.tokens, self.salt = tokens, salt
        self.num_computed = 0
        self.has_record = False


class StateMachine(RuleBasedStateMachine):
    """Sequences that grow, fork, share, are truncated, preempted and end, with too few records and pages.

    A record holds a checksum of the tokens after which it is the state, and so does each position of a page.
    """

    @initialize(num_records=st.integers(2, 9), snapshot_pages=st.integers(0, 2))
    def begin(self, num_records: int, snapshot_pages: int) -> None:
        shape = StateShape(record_bytes=RECORD_BYTES, num_records=num_records, snapshot_pages=snapshot_pages)
        self.sequences = Sequences(PAGES, PAGE, 100, shape)
        self.states = states_of(self.sequences)
        self.memory: dict[tuple[int, int], int] = {}
        self.open: dict[int, SequenceModel] = {}

    def pick(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.open)))

    def add(self, tokens: list[int], num_prompt_tokens: int, salt: str | None) -> int:
        slot = self.sequences.open(tokens, num_prompt_tokens, cache_salt=salt)
        self.open[slot] = SequenceModel(list(tokens), salt)
        return slot

    def check_pages(self, slot: int) -> None:
        """The pages hold what belongs to the computed tokens."""
        model, pages = self.open[slot], self.sequences.pages(slot)
        for position in range(model.num_computed):
            assert self.memory[pages[position // PAGE], position % PAGE] == state_after(model.tokens[: position + 1])

    def longest_match(self, slot: int) -> int:
        """Return the most tokens that have both pages and a snapshot."""
        model = self.open[slot]
        if model.salt is None:
            return 0
        tree = self.sequences.tree
        root = tree.enter(model.salt)
        pages = tree.match(root, model.tokens[:-1])
        tree.leave(root)
        return max([PAGE * (i + 1) for i, page in enumerate(pages) if self.states.snapshot(page) >= 0], default=0)

    def start(self, slot: int) -> None:
        model = self.open[slot]
        expected = self.longest_match(slot)
        assert self.sequences.match(slot)[0] == expected
        found = self.sequences.start(slot, len(model.tokens))
        if found is None:
            assert self.sequences.pages(slot) == []
            return
        assert found == expected
        model.num_computed, model.has_record = found, True
        self.check_pages(slot)

    @precondition(lambda self: len(self.open) < 5)
    @rule(length=st.integers(1, 14), token=st.integers(0, 2), salt=st.sampled_from([None, "a", "a"]))
    def open_one(self, length: int, token: int, salt: str | None) -> None:
        """Few different prompts, so that their beginnings are found."""
        self.start(self.add([token] * length, max(1, length - 3), salt))

    @precondition(lambda self: self.open and len(self.open) < 5)
    @rule(data=st.data())
    def fork_one(self, data: st.DataObject) -> None:
        source = self.pick(data)
        model = self.open[source]
        if not model.num_computed:
            return
        count = data.draw(st.integers(1, model.num_computed))
        slot = self.add([*model.tokens[:count], 7], count, model.salt)
        if not self.sequences.fork(slot, source, count, count + 1):
            assert self.sequences.pages(slot) == []
            return
        child = self.open[slot]
        child.num_computed, child.has_record = self.sequences.resume(slot, count), True
        assert child.num_computed == count or child.num_computed % PAGE == 0
        assert child.num_computed == count or count < model.num_computed
        old, new = self.sequences.pages(source), self.sequences.pages(slot)
        for position in range(child.num_computed // PAGE * PAGE, child.num_computed):  # as Runner.fork does
            self.memory[new[position // PAGE], position % PAGE] = self.memory[old[position // PAGE], position % PAGE]
        self.check_pages(slot)

    @precondition(lambda self: self.open)
    @rule(data=st.data(), tokens=st.lists(st.integers(0, 2), min_size=1, max_size=6))
    def append(self, data: st.DataObject, tokens: list[int]) -> None:
        slot = self.pick(data)
        for token in tokens:
            self.sequences.append(slot, token)
            self.open[slot].tokens.append(token)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        """Compute tokens, some of which may be taken back. The step may fail."""
        slot = self.pick(data)
        model, sequences = self.open[slot], self.sequences
        begin, end = model.num_computed, data.draw(st.integers(0, len(model.tokens)))
        if end <= begin:
            return
        missing = -(-end // PAGE) - len(sequences.pages(slot))
        has_pages = missing <= sequences.free_pages + sequences.cached_pages
        has_record = model.has_record or self.states.free_records + self.states.cached_records > 0
        assert sequences.reserve(slot, end) == (has_pages and has_record)
        if not has_pages or not has_record:
            return
        model.has_record = True
        certain = data.draw(st.integers(begin, end))
        has_all = self.states.free_records + self.states.cached_records > end - certain
        lengths = compute(sequences, slot, begin, end, certain)
        assert not has_all or {*range(max(certain, begin + 1), end + 1)} <= {*lengths}
        others = {page for other in self.open if other != slot for page in sequences.pages(other)}
        for position in range(begin, end):
            cell = sequences.pages(slot)[position // PAGE], position % PAGE
            assert cell[0] not in others
            self.memory[cell] = state_after(model.tokens[: position + 1])
        if data.draw(st.booleans()):
            kept = data.draw(st.integers(certain, end))
            sequences.share(slot, kept)
            model.num_computed = sequences.resume(slot, kept)
            assert model.num_computed == kept or not has_all
        else:
            model.num_computed = sequences.resume(slot, begin)
            assert model.num_computed == begin or model.num_computed % PAGE == 0
        self.check_pages(slot)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        slot = self.pick(data)
        model = self.open[slot]
        kept = data.draw(st.integers(max(1, len(model.tokens) - 8), len(model.tokens)))
        recompute_last = data.draw(st.booleans())
        try:
            left = self.sequences.truncate(slot, kept, recompute_last=recompute_last)
        except ValueError:  # a part of the prompt
            return
        del model.tokens[kept:]
        model.num_computed = min(model.num_computed, left)
        assert model.num_computed <= kept - recompute_last
        self.check_pages(slot)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        slot = self.pick(data)
        self.sequences.release_pages(slot)
        self.open[slot].num_computed, self.open[slot].has_record = 0, False
        self.start(slot)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        slot = self.pick(data)
        self.sequences.close(slot)
        del self.open[slot]

    @rule(count=st.integers(0, 3))
    def evict(self, count: int) -> None:
        self.sequences.tree.evict(count)

    @invariant()
    def records_and_pages_add_up(self) -> None:
        states, sequences = self.states, self.sequences
        assert states.free_records + states.cached_records + states.held_records == states.total
        with_record = sum(model.has_record for model in self.open.values())
        assert with_record <= states.held_records <= with_record + len(self.open)
        held = {page for slot in self.open for page in sequences.pages(slot)}
        assert sequences.free_pages + sequences.cached_pages + len(held) == PAGES
        snapshots = [record for page in range(PAGES) if (record := states.snapshot(page)) >= 0]
        assert len({*snapshots}) == len(snapshots) >= states.cached_records

    def teardown(self) -> None:
        """Snapshots outlive sequences, and end with their pages."""
        for slot in [*self.open]:
            model = self.open[slot]
            self.sequences.close(slot)
            again = self.add([*model.tokens, 0], 1, model.salt)
            self.start(again)
            if self.open[again].num_computed:
                compute(self.sequences, again, self.open[again].num_computed, len(model.tokens) + 1)
            self.sequences.close(again)
        assert self.states.held_records == 0
        self.sequences.tree.evict(PAGES)
        assert self.states.free_records == self.states.total
        assert self.sequences.free_pages == PAGES


StateMachine.TestCase.settings = settings(max_examples=250, stateful_step_count=40, deadline=None)
test_states_among_others = StateMachine.TestCase


def make(num_records: int = 16, snapshot_pages: int = 0, num_pages: int = 64) -> Sequences:
    shape = StateShape(record_bytes=RECORD_BYTES, num_records=num_records, snapshot_pages=snapshot_pages)
    return Sequences(num_pages, PAGE, 100, shape)


def prompt_of(length: int, token: int = 0) -> list[int]:
    return [(token + i) % 100 for i in range(length)]


def run(sequences: Sequences, tokens: list[int], chunk: int = 1000) -> tuple[int, int]:
    """Compute a prompt in chunks; return its slot and the number of tokens that were found."""
    slot = sequences.open(tokens, len(tokens), cache_salt="")
    found = sequences.start(slot, len(tokens))
    assert found is not None
    for start in range(found, len(tokens), chunk):
        end = min(start + chunk, len(tokens))
        compute(sequences, slot, start, end)
        sequences.share(slot, end)
        assert sequences.resume(slot, end) == end
    return slot, found


def decode(sequences: Sequences, slot: int, tokens: Iterable[int]) -> None:
    for token in tokens:
        sequences.append(slot, token)
        size = sequences.num_tokens(slot)
        assert sequences.reserve(slot, size)
        compute(sequences, slot, size - 1, size)
        sequences.share(slot, size)


def found(sequences: Sequences, tokens: list[int]) -> int:
    slot = sequences.open([*tokens, 0], 1, cache_salt="")
    try:
        return sequences.match(slot)[0]
    finally:
        sequences.close(slot)


@pytest.mark.parametrize("chunk", [4, 7, 100])
@pytest.mark.parametrize(("length", "expected"), [(4, 0), (5, 4), (30, 28), (32, 28), (33, 32)])
def test_a_prompt_begins_where_the_same_prompt_ended(length: int, expected: int, chunk: int) -> None:
    sequences = make()
    sequences.close(run(sequences, prompt_of(length), chunk)[0])
    assert run(sequences, prompt_of(length))[1] == expected


def test_prompts_part_at_a_snapshot_from_the_second_one_on() -> None:
    """The first does not know what others share with it, and nor does the second before it has looked."""
    sequences, shared = make(), prompt_of(22)
    starts = [run(sequences, [*shared, *prompt_of(17, 50 + i)])[1] for i in range(4)]
    assert starts == [0, 0, 20, 20]


def test_a_long_prompt_leaves_snapshots_at_each_double_of_the_first_length() -> None:
    sequences, tokens = make(snapshot_pages=2), prompt_of(4 * 41)
    sequences.close(run(sequences, tokens, chunk=17)[0])
    assert [found(sequences, tokens[:length]) for length in (7, 8, 15, 16, 31, 32, 63, 64, 127, 128, 163, 164)] == [
        *(0, 8, 8, 16, 16, 32, 32, 64, 64, 128, 160, 164),
    ]
    assert states_of(sequences).cached_records == 7


def test_an_answer_leaves_the_snapshot_of_its_last_full_page() -> None:
    sequences, tokens = make(), prompt_of(10)
    slot, _ = run(sequences, tokens)
    decode(sequences, slot, answer := prompt_of(23, 60))
    states = states_of(sequences)
    assert (states.held_records, states.cached_records) == (1, 2)
    assert found(sequences, [*tokens, *answer]) == 32
    assert found(sequences, [*tokens, *answer[:-2]]) == 8
    sequences.release_pages(slot)  # preempted
    assert sequences.start(slot, 33) == 32
    compute(sequences, slot, 32, 33)


def test_drafts_that_are_taken_back_leave_the_state_before_them() -> None:
    sequences = make()
    slot, _ = run(sequences, prompt_of(10))
    for kept in (11, 12, 15, 16, 17, 22):
        start = sequences.num_tokens(slot)
        for token in range(5):
            sequences.append(slot, token)
        assert sequences.reserve(slot, start + 5)
        lengths = compute(sequences, slot, start, start + 5, certain=start + 1)
        assert lengths == [start + i for i in range(1, 6)]
        assert states_of(sequences).held_records == 5 + (start % PAGE == 0)  # that at the end of a page is to be kept
        sequences.share(slot, kept)
        assert states_of(sequences).held_records == 1
        assert sequences.truncate(slot, kept, recompute_last=False) == kept


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_drafts_that_are_taken_back_up_to_the_end_of_a_page_leave_its_snapshot(num_drafts: int) -> None:
    sequences = make()
    slot, _ = run(sequences, tokens := prompt_of(10))
    answer = [1, 2]
    for token in (*answer, 7, 7):
        sequences.append(slot, token)
    assert sequences.reserve(slot, 14)
    compute(sequences, slot, 10, 14, certain=11)
    sequences.share(slot, 12)
    sequences.truncate(slot, 12, recompute_last=False)
    for token in range(1 + num_drafts):
        sequences.append(slot, token)
    assert sequences.reserve(slot, 13 + num_drafts)
    compute(sequences, slot, 12, 13 + num_drafts, certain=13)
    sequences.share(slot, 13)
    assert found(sequences, [*tokens, *answer, 0]) == 12


def test_accepted_drafts_are_computed_again_where_records_are_short() -> None:
    sequences = make(num_records=3)
    slot, _ = run(sequences, prompt_of(3))
    for token in range(5):
        sequences.append(slot, token)
    assert sequences.reserve(slot, 8)
    assert compute(sequences, slot, 3, 8, certain=4) == [4, 5, 6]
    sequences.share(slot, 8)
    assert sequences.resume(slot, 8) == 6
    assert sequences.shared(slot)[0] == 4
    compute(sequences, slot, 6, 8)


def test_a_token_whose_successor_cannot_be_sampled_yet_is_computed_again() -> None:
    sequences = make()
    slot, _ = run(sequences, prompt_of(9))
    decode(sequences, slot, [1])
    sequences.append(slot, 2)
    assert sequences.reserve(slot, 11)
    assert compute(sequences, slot, 10, 11, certain=10) == [11]
    sequences.share(slot, 10)
    assert sequences.resume(slot, 10) == 10
    compute(sequences, slot, 10, 11)


def test_a_failed_step_goes_back_to_a_snapshot() -> None:
    """Its pages from there on are given back, since others may have them: they are never written again."""
    sequences, tokens = make(), prompt_of(11)
    slot, _ = run(sequences, tokens)
    decode(sequences, slot, [1, 2, 3, 4, 5, 6])
    sequences.append(slot, 7)
    compute(sequences, slot, 17, 18)
    assert sequences.resume(slot, 17) == 16
    assert len(sequences.pages(slot)) == 4
    assert sequences.truncate(slot, 15) == 8
    assert sequences.reserve(slot, 15)
    compute(sequences, slot, 8, 15)


def test_a_fork_has_a_copy_of_the_state() -> None:
    sequences = make()
    source, _ = run(sequences, prompt_of(10))
    fork = sequences.open([*prompt_of(10), 5], 10, cache_salt="")
    assert sequences.fork(fork, source, 10, 11)
    assert sequences.resume(fork, 10) == 10
    decode(sequences, source, [8])
    compute(sequences, fork, 10, 11)
    late = sequences.open(prompt_of(10), 10, cache_salt="")  # the source has gone on
    assert sequences.fork(late, source, 9, 10)
    assert sequences.resume(late, 9) == 8
    compute(sequences, late, 8, 10)


def test_what_a_sequence_begins_with_is_not_evicted() -> None:
    """A pin is a sequence without tokens of its own: it takes no record, and keeps the snapshot."""
    sequences, tokens = make(num_records=4), prompt_of(9)
    sequences.close(run(sequences, tokens)[0])
    pin = sequences.open(tokens, 9, cache_salt="")
    assert sequences.start(pin, 8) == 8
    states = states_of(sequences)
    assert (states.held_records, states.cached_records) == (1, 0)
    others = [run(sequences, prompt_of(9, token))[0] for token in (10, 20, 30)]
    assert found(sequences, tokens) == 8
    slot = sequences.open(tokens, 9, cache_salt="")
    assert sequences.start(slot, 9) is None
    assert sequences.pages(slot) == []
    sequences.close(others.pop())
    assert sequences.start(slot, 9) == 8
    compute(sequences, slot, 8, 9)


def test_the_least_recently_used_snapshot_gives_way() -> None:
    sequences = make(num_records=3)
    for token in (0, 20, 0, 40):
        sequences.close(run(sequences, prompt_of(9, token))[0])
    assert [found(sequences, prompt_of(9, token)) for token in (0, 20, 40)] == [8, 0, 8]
    assert states_of(sequences).num_evicted == 1


def test_a_model_without_state_has_no_records() -> None:
    sequences = Sequences(8, PAGE, 100)
    slot = sequences.open([1] * 5, 5, cache_salt="")
    sequences.start(slot, 5)
    assert sequences.states is None
    assert sequences.resume(slot, 5) == 5
    with pytest.raises(RuntimeError, match="the model has no state"):
        sequences.write_states(slot, 0, 5, 5)


def test_states_are_written_in_order() -> None:
    sequences = make()
    slot = sequences.open([1] * 9, 9)
    with pytest.raises(ValueError, match=r"up to token 9 of slot 0, which has 9 tokens and pages for 0"):
        sequences.write_states(slot, 0, 9, 9)
    assert sequences.start(slot, 9) == 0
    for start, end, certain in ((1, 2, 2), (0, 0, 0), (0, 4, 5), (0, 4, -1)):
        with pytest.raises(ValueError, match=f"tokens {start} to {end}, of which {certain} are certain"):
            sequences.write_states(slot, start, end, certain)


@pytest.mark.parametrize(("record_bytes", "num_records", "pages"), [(-1, 2, 0), (8, 1, 0), (8, 2, -1), (2**62, 2, 0)])
def test_bad_shapes_are_rejected(record_bytes: int, num_records: int, pages: int) -> None:
    shape = StateShape(record_bytes=record_bytes, num_records=num_records, snapshot_pages=pages)
    with pytest.raises(ValueError, match=f"num_records={num_records} of record_bytes={record_bytes}"):
        Sequences(8, PAGE, 100, shape)
