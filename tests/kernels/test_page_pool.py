"""The page pool against a brute-force model, and the runs that it hands out."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from quire.kernels import _native


class PagePoolModel(RuleBasedStateMachine):
    """Sequences that grow, fork and end, with a list of the expected reference counts."""

    @initialize(total=st.integers(1, 40), extent=st.integers(1, 45))
    def create(self, total: int, extent: int) -> None:
        self.pool = _native.PagePool(total, extent)
        self.extent, self.most_held = extent, 0
        self.references = [0] * total
        self.sequences: list[list[int]] = []

    @rule(count=st.integers(0, 12), which=st.integers(0, 100), new=st.booleans())
    def grow(self, count: int, which: int, new: bool) -> None:
        if new or not self.sequences:
            self.sequences.append([])
        sequence = self.sequences[-1 if new else which % len(self.sequences)]
        free = self.references.count(0)
        follows = sequence and sequence[-1] + 1 < self.pool.committed and self.references[sequence[-1] + 1] == 0
        pages = self.pool.allocate(count, sequence)
        assert (pages is None) == (count > free)
        if not pages:
            return
        assert len(pages) == len(set(pages)) == count
        assert all(self.references[page] == 0 for page in pages)
        assert not follows or pages[0] == sequence[-1] + 1
        for page in pages:
            self.references[page] = 1
        sequence += pages
        assert max(pages) < self.pool.committed

    @precondition(lambda self: self.sequences)
    @rule(which=st.integers(0, 100))
    def fork(self, which: int) -> None:
        sequence = self.sequences[which % len(self.sequences)]
        for page in sequence:
            self.pool.retain(page)
            self.references[page] += 1
        self.sequences.append(list(sequence))

    @precondition(lambda self: self.sequences)
    @rule(which=st.integers(0, 100))
    def end(self, which: int) -> None:
        for page in self.sequences.pop(which % len(self.sequences)):
            self.pool.release(page)
            self.references[page] -= 1

    @rule(page=st.integers(-2, 41))
    def misuse(self, page: int) -> None:
        if 0 <= page < len(self.references) and self.references[page] > 0:
            return
        for operation in (self.pool.retain, self.pool.release):
            with pytest.raises((ValueError, RuntimeError), match=f"page {page}"):
                operation(page)

    @invariant()
    def every_page_is_accounted_for(self) -> None:
        pool = self.pool
        assert pool.free_pages + pool.held_pages == pool.total == len(self.references)
        assert pool.free_pages == self.references.count(0)
        assert [pool.references(page) for page in range(pool.total)] == self.references

    @invariant()
    def pages_are_committed_by_extents(self) -> None:
        most = max(self.most_held, self.pool.held_pages)
        self.most_held = most
        total, extent = self.pool.total, self.extent
        assert self.pool.committed == next(
            committed
            for committed in (*range(extent, total, extent), total)
            if committed == total or committed - most >= committed // 2
        )

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        while self.sequences:
            self.end(0)
        assert self.pool.allocate(self.pool.total) == list(range(self.pool.total))


TestPagePoolModel = PagePoolModel.TestCase
TestPagePoolModel.settings = settings(max_examples=150, stateful_step_count=40)


def some(pages: list[int] | None) -> list[int]:
    """Return the pages of an allocation that must succeed."""
    assert pages is not None
    return pages


def test_pages_of_one_request_are_a_run() -> None:
    pool = _native.PagePool(100)
    first, second = some(pool.allocate(10)), some(pool.allocate(20))
    assert first == list(range(first[0], first[0] + 10))
    assert second == list(range(second[0], second[0] + 20))


def test_sequences_that_grow_concurrently_stay_contiguous() -> None:
    pool = _native.PagePool(1024)
    sequences = [some(pool.allocate(1)) for _ in range(8)]
    for _ in range(63):
        for sequence in sequences:
            sequence += some(pool.allocate(1, sequence))
    for sequence in sequences:
        assert sequence == list(range(sequence[0], sequence[0] + 64))


def test_an_allocation_takes_all_or_nothing() -> None:
    pool = _native.PagePool(8)
    pool.allocate(5)
    assert pool.allocate(4) is None
    assert (pool.free_pages, pool.held_pages) == (3, 5)
    assert len(some(pool.allocate(3))) == 3
    assert pool.allocate(0) == []


def test_a_page_is_freed_with_its_last_reference() -> None:
    pool = _native.PagePool(1)
    [page] = some(pool.allocate(1))
    pool.retain(page)
    pool.release(page)
    assert pool.free_pages == 0
    pool.release(page)
    assert pool.free_pages == 1
    with pytest.raises(RuntimeError, match="release of page 0, which is free"):
        pool.release(page)


@pytest.mark.parametrize("num_pages", [0, -1])
def test_a_pool_needs_a_page(num_pages: int) -> None:
    with pytest.raises(ValueError, match=f"num_pages={num_pages}"):
        _native.PagePool(num_pages)


def test_a_negative_count_is_rejected() -> None:
    with pytest.raises(ValueError, match="count=-1"):
        _native.PagePool(4).allocate(-1)
