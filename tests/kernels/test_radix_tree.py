"""The prefix cache against a dictionary of all prefixes."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from quire.kernels._native import PagePool, RadixTree

PAGE = 2
SALTS = ["", "a", "b"]
TOKENS = st.lists(st.integers(0, 2), max_size=12)

Key = tuple[str, tuple[int, ...]]
"""A page: its salt, and all tokens up to its end."""


class Cache:
    """A tree, the sequences that use it, and what the tree should hold: in order of last use, least recent first."""

    def __init__(self, num_pages: int, page_size: int = PAGE) -> None:
        self.page_size = page_size
        self.pool = PagePool(num_pages)
        self.tree = RadixTree(self.pool, page_size)
        self.pages: dict[Key, int] = {}
        self.unused: dict[Key, None] = {}
        self.sequences: list[tuple[str, int, list[int], list[int]]] = []  # salt, root, tokens, pages

    def keys(self, salt: str, tokens: list[int]) -> Iterator[Key]:
        """Of the full pages of `tokens`."""
        for end in range(self.page_size, len(tokens) + 1, self.page_size):
            yield salt, tuple(tokens[:end])

    def add(self, salt: str, tokens: list[int]) -> bool:
        """A sequence that takes what it finds, computes the rest and shares it."""
        root = self.tree.enter(salt)
        found = self.tree.match(root, tokens)
        keys = list(self.keys(salt, tokens))
        known = [self.pages[key] for key in keys if key in self.pages]
        assert found == known == [self.pages[key] for key in keys[: len(found)]]
        for page in found:
            self.tree.retain(page)
        for key in keys[: len(found)]:
            self.unused.pop(key, None)
        missing = len(keys) - len(found)
        self.evict(max(0, missing - self.pool.free_pages))
        own = self.pool.allocate(missing, found)
        if own is None:
            self.leave(salt, root, tokens, found)
            return False
        pages = [*found, *own]
        for i in range(len(found), len(keys)):
            parent = pages[i - 1] if i else root
            assert self.tree.insert(parent, keys[i][1][-self.page_size :], pages[i]) == pages[i]
            self.pages[keys[i]] = pages[i]
        self.sequences.append((salt, root, tokens, pages))
        return True

    def remove(self, index: int) -> None:
        self.leave(*self.sequences.pop(index))

    def leave(self, salt: str, root: int, tokens: list[int], pages: list[int]) -> None:
        used = {key for other, _, their, _ in self.sequences for key in self.keys(other, their)}
        keys = list(self.keys(salt, tokens))[: len(pages)]
        for key, page in reversed([*zip(keys, pages, strict=True)]):
            self.tree.release(page)
            if key not in used:
                self.unused[key] = None
        self.tree.leave(root)

    def evict(self, count: int) -> None:
        expected = list(self.unused)[:count]
        assert self.tree.evict(count) == len(expected)
        for key in expected:
            assert not any(
                other != key and other[0] == key[0] and other[1][: len(key[1])] == key[1] for other in self.pages
            )
            del self.unused[key], self.pages[key]

    def check(self) -> None:
        assert self.tree.size == len(self.pages)
        assert self.tree.cached_pages == len(self.unused)
        assert self.pool.held_pages == len(self.pages)
        assert self.pool.free_pages == self.pool.total - len(self.pages)


class CacheStates(RuleBasedStateMachine):
    @initialize(num_pages=st.integers(1, 20))
    def start(self, num_pages: int) -> None:
        self.cache = Cache(num_pages)

    @rule(salt=st.sampled_from(SALTS), tokens=TOKENS)
    def add(self, salt: str, tokens: list[int]) -> None:
        self.cache.add(salt, tokens)

    @rule(index=st.integers(0, 10))
    def remove(self, index: int) -> None:
        if index < len(self.cache.sequences):
            self.cache.remove(index)

    @rule(count=st.integers(0, 3))
    def evict(self, count: int) -> None:
        self.cache.evict(count)

    @invariant()
    def accounts(self) -> None:
        self.cache.check()

    def teardown(self) -> None:
        while self.cache.sequences:
            self.cache.remove(0)
        self.cache.evict(self.cache.pool.total)
        self.cache.check()
        assert self.cache.pool.free_pages == self.cache.pool.total


CacheStates.TestCase.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
TestCacheStates = CacheStates.TestCase


def test_the_first_of_two_equal_pages_is_kept() -> None:
    pool = PagePool(4)
    tree = RadixTree(pool, PAGE)
    root = tree.enter("")
    first, second = pool.allocate(2) or []
    assert tree.insert(root, [1, 2], first) == first
    assert tree.insert(root, [1, 2], second) == first
    assert tree.insert(tree.enter("other"), [1, 2], second) == second
    assert (pool.references(first), pool.references(second)) == (2, 2)


def test_an_old_path_that_is_used_again_outlives_a_newer_one() -> None:
    cache = Cache(8)
    cache.add("", [1, 1, 2, 2])
    cache.remove(0)
    cache.add("", [3, 3])
    cache.remove(0)
    cache.add("", [1, 1])
    cache.remove(0)
    cache.evict(2)
    assert set(cache.pages) == {("", (1, 1))}


@pytest.mark.parametrize("tokens", [[1], [1, 2, 3]])
def test_a_page_that_is_not_full_is_refused(tokens: list[int]) -> None:
    pool = PagePool(4)
    tree = RadixTree(pool, PAGE)
    with pytest.raises(ValueError, match=f"a page of 2 tokens can't hold {len(tokens)}"):
        tree.insert(tree.enter(""), tokens, (pool.allocate(1) or [])[0])


def test_depth_first_order() -> None:
    cache = Cache(32, page_size=1)
    paths = [[1], [2, 1, 1], [1, 1, 1, 1], [], [2, 1], [1, 2, 1], [1, 1], [3, 1]]
    for path in paths:
        cache.add("", path)
    ends = [pages[-1] if pages else -1 for _, _, _, pages in cache.sequences]
    order = [paths[i] for i in cache.tree.depth_first(ends)]
    assert order == [[1, 1, 1, 1], [1, 1], [1, 2, 1], [1], [2, 1, 1], [2, 1], [3, 1], []]


def test_random_operations_against_the_dictionary() -> None:
    choose = random.Random(5)
    cache = Cache(300, page_size=4)
    for _ in range(3000):
        if cache.sequences and choose.random() < 0.5:
            cache.remove(choose.randrange(len(cache.sequences)))
        else:
            base = choose.choice(cache.sequences)[2] if cache.sequences and choose.random() < 0.7 else []
            tokens = base[: choose.randrange(len(base) + 1)] + choose.choices(range(5), k=choose.randrange(30))
            cache.add(choose.choice(SALTS), tokens)
        cache.check()
