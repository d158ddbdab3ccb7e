"""The prefixes with the most matches, against a count of all matches."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from quire.kernels._native import Sequences

BLOCK_SIZE = 2

Prefix = tuple[str, tuple[int, ...]]


class Cache:
    """Sequences that start and end immediately, and the number of matches of each of their prefixes."""

    def __init__(self, num_pages: int) -> None:
        self.sequences = Sequences(num_pages, BLOCK_SIZE, 100)
        self.hits: Counter[Prefix] = Counter()
        self.ends: set[Prefix] = set()

    def visit(self, tokens: list[int], salt: str = "") -> int:
        """Run a sequence and return the number of cached tokens."""
        slot = self.open(tokens, salt)
        found = self.sequences.start(slot, len(tokens))
        assert found is not None
        for end in range(BLOCK_SIZE, found + 1, BLOCK_SIZE):
            self.hits[salt, tuple(tokens[:end])] += 1
        if found:
            self.ends.add((salt, tuple(tokens[:found])))
        self.sequences.share(slot, len(tokens))
        self.sequences.close(slot)
        return found

    def open(self, tokens: list[int], salt: str = "") -> int:
        return self.sequences.open(tokens, len(tokens), cache_salt=salt)

    def expected(self) -> list[tuple[int, int, bool, list[int], list[int]]]:
        """Return hits, pages, salt, first and last tokens of every prefix at which a match ended, most hits first."""
        found = []
        for salt, tokens in self.ends:
            last = list(tokens[-BLOCK_SIZE:]) if len(tokens) > BLOCK_SIZE else []
            found.append((self.hits[salt, tokens], len(tokens) // 2, salt != "", list(tokens[:BLOCK_SIZE]), last))
        return sorted(found, key=lambda prefix: prefix[:2], reverse=True)


@pytest.mark.parametrize("seed", range(5))
def test_the_hottest_are_those_with_the_most_hits(seed: int) -> None:
    choose = random.Random(seed)
    cache = Cache(2000)
    for _ in range(300):
        tokens = [choose.randrange(2) for _ in range(choose.randrange(1, 7))]
        cache.visit([*tokens, 9], choose.choice(["", "salt"]))
    found = cache.sequences.tree.hottest(1000)
    expected = cache.expected()
    assert len(expected) < 64
    assert [(hits, pages) for hits, pages, *_ in found] == [prefix[:2] for prefix in expected]
    assert sorted((hits, pages, *rest) for hits, pages, _, *rest in found) == sorted(expected)
    assert cache.sequences.tree.hottest(3) == found[:3]


def test_more_prefixes_than_candidates() -> None:
    """Of 90 prefixes the 40 with two or more matches are among the 64 candidates, in any order of visits."""
    cache = Cache(2000)
    choose = random.Random(7)
    visits = [prefix for prefix in range(90) for _ in range(2 if prefix < 50 else prefix - 46)]
    choose.shuffle(visits)
    for prefix in visits:
        cache.visit([prefix, 1, 2, 3, 4])
    assert [prefix[4][0] for prefix in cache.sequences.tree.hottest(39)] == list(range(89, 50, -1))


def test_evicted_prefixes_are_dropped() -> None:
    cache = Cache(20)
    for _ in range(3):
        cache.visit([1, 2, 3])
        cache.visit([4, 5, 6])
    assert [prefix[:2] for prefix in cache.sequences.tree.hottest(9)] == [(2, 1), (2, 1)]
    cache.sequences.tree.evict(1)
    assert [prefix[4] for prefix in cache.sequences.tree.hottest(9)] == [[4, 5]]
    cache.visit([1, 2, 3])
    assert cache.visit([1, 2, 3]) == 2
    assert [(prefix[0], prefix[4]) for prefix in cache.sequences.tree.hottest(9)] == [(2, [4, 5]), (1, [1, 2])]


def test_users_are_the_sequences_that_hold_a_prefix() -> None:
    cache = Cache(20)
    for _ in range(2):
        cache.visit([1, 2, 3])
    slots = [cache.open([1, 2, 7]) for _ in range(3)]
    for users, slot in enumerate(slots, 1):
        cache.sequences.start(slot, 3)
        assert cache.sequences.tree.hottest(1)[0][2] == users
    assert cache.sequences.tree.hottest(1)[0][0] == 4


def test_a_sequence_that_gets_no_pages_is_not_counted() -> None:
    cache = Cache(4)
    cache.visit([1, 2, 3])
    slot = cache.open([1, 2, 3])
    assert cache.sequences.start(slot, 100) is None
    assert cache.sequences.tree.hottest(1) == []
