"""Changes of the prefix cache: whoever follows them has what the cache has, however seldom they are taken."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from quire.kernels._native import PrefixWatch, SamplingConfig, Sequences

PAGE = 2
SALTS = ["", "a", "b"]
Path = tuple[int, ...]
Prefix = tuple[str, Path]


@dataclass
class Follower:
    """What the changes of a watch say, taken a few at a time."""

    watch: PrefixWatch
    salts: set[str]
    salt_of: dict[int, str]  # by the number of its root
    known: dict[int, Prefix] = field(default_factory=dict)

    def take(self, most: int) -> int:
        """Apply changes as the docstring of PrefixChanges says; return of how many pages."""
        removed, stored = self.watch.take(most)
        for key in removed:
            del self.known[key]
        for parent, root, is_salted, keys, tokens in stored:
            assert len(tokens) == PAGE * len(keys)
            salt, path = (self.salt_of[root], ()) if parent is None else self.known[parent]
            assert salt == self.salt_of[root]
            assert is_salted == bool(salt)
            for number, key in enumerate(keys):
                assert key not in self.known
                path = (*path, *tokens[PAGE * number : PAGE * (number + 1)])
                self.known[key] = salt, path
        return len(removed) + sum(len(keys) for _, _, _, keys, _ in stored)


class FollowedCache(RuleBasedStateMachine):
    """Sequences of few different tokens share pages and lose them, and followers come and go."""

    def __init__(self) -> None:
        super().__init__()
        self.sequences = Sequences(12, PAGE, 10)
        self.open: list[int] = []
        self.ever: set[Prefix] = set()
        self.salt_of = dict(zip(self.sequences.tree.watch_salts().add_salts(SALTS), SALTS, strict=True))
        self.followers: list[Follower] = []

    @initialize(tokens=st.lists(st.integers(0, 1), max_size=8))
    def begin(self, tokens: list[int]) -> None:
        """Follow a cache that may have pages already."""
        self.run("", tokens)
        self.follow(is_restricted=False)

    @rule(is_restricted=st.booleans())
    def follow(self, is_restricted: bool) -> None:
        """Add a follower of all salts, or of none yet."""
        tree = self.sequences.tree
        watch = tree.watch_salts() if is_restricted else tree.watch()
        self.followers.append(Follower(watch, set() if is_restricted else set(SALTS), self.salt_of))

    @rule(place=st.integers(0, 5), salts=st.lists(st.sampled_from(SALTS)))
    def add_salts(self, place: int, salts: list[str]) -> None:
        """Let a follower watch further salts, or those that it watches already."""
        for follower in self.chosen(place):
            numbers = follower.watch.add_salts(salts)
            assert [self.salt_of[number] for number in numbers] == salts
            follower.salts |= set(salts)

    @rule(place=st.integers(0, 5))
    def unfollow(self, place: int) -> None:
        """Drop a follower with its watch."""
        for follower in self.chosen(place):
            self.followers.remove(follower)

    @rule(salt=st.sampled_from(SALTS), tokens=st.lists(st.integers(0, 1), min_size=1, max_size=9))
    def run(self, salt: str, tokens: list[int]) -> None:
        """Compute a sequence, if there are pages for it."""
        slot = self.sequences.open([*tokens, 2], len(tokens) + 1, sampling=SamplingConfig(), cache_salt=salt)
        if self.sequences.start(slot, len(tokens) + 1) is None:
            self.sequences.close(slot)
            return
        self.sequences.share(slot, len(tokens))
        self.open.append(slot)
        self.ever |= {(salt, tuple(tokens[:end])) for end in range(PAGE, len(tokens) + 1, PAGE)}

    @rule(place=st.integers(0, 100))
    def close(self, place: int) -> None:
        """End a sequence; its pages stay cached."""
        if self.open:
            self.sequences.close(self.open.pop(place % len(self.open)))

    @rule(count=st.integers(1, 12))
    def evict(self, count: int) -> None:
        """Evict pages."""
        self.sequences.tree.evict(count)

    @rule(place=st.integers(0, 5), most=st.integers(0, 5) | st.just(100))
    def take(self, place: int, most: int) -> None:
        """Take some of the changes: as many as asked for, or all."""
        for follower in self.chosen(place):
            count = follower.take(most)
            assert count <= most
            assert count == most or not follower.watch.has_changes

    def chosen(self, place: int) -> Iterator[Follower]:
        """Yield the follower at a place, if there are any."""
        if self.followers:
            yield self.followers[place % len(self.followers)]

    def cached(self) -> set[Prefix]:
        """Return all prefixes of full pages that the cache finds."""
        tree, found = self.sequences.tree, set()
        for salt, path in self.ever:
            root = tree.enter(salt)
            if len(tree.match(root, list(path))) == len(path) // PAGE:
                found.add((salt, path))
            tree.leave(root)
        assert len(found) == tree.size
        return found

    @invariant()
    def follows(self) -> None:
        """All that a follower knows can be found; once it has all changes, that is what its salts have."""
        cached = self.cached()
        for follower in self.followers:
            known = set(follower.known.values())
            assert len(known) == len(follower.known)
            assert all(len(path) == PAGE or (salt, path[:-PAGE]) in known for salt, path in known)
            if not follower.watch.has_changes:
                assert known == {(salt, path) for salt, path in cached if salt in follower.salts}


FollowedCache.TestCase.settings = settings(max_examples=100, stateful_step_count=40)
TestFollowedCache = FollowedCache.TestCase


def compute(sequences: Sequences, tokens: list[int], salt: str = "") -> None:
    """Compute a sequence, whose pages stay cached."""
    slot = sequences.open(tokens, len(tokens), sampling=SamplingConfig(), cache_salt=salt)
    assert sequences.start(slot, len(tokens)) == 0
    sequences.share(slot, len(tokens) - 1)
    sequences.close(slot)


def test_what_came_and_went_is_not_told() -> None:
    sequences = Sequences(8, PAGE, 10)
    watch = sequences.tree.watch()
    compute(sequences, [1, 2, 3, 4, 5])
    has_changed = watch.has_changes
    assert sequences.tree.evict(8) == 2
    assert (has_changed, watch.has_changes) == (True, False)
    assert watch.take(8) == ([], [])


def test_a_long_prefix_is_told_in_parts_that_follow_one_another() -> None:
    sequences = Sequences(16, PAGE, 100)
    compute(sequences, list(range(21)))
    watch, whole = sequences.tree.watch(), sequences.tree.watch()
    ((_, root, _, keys, tokens),) = whole.take(16)[1]
    parts = [watch.take(4) for _ in range(3)]
    assert parts == [
        ([], [(None, root, False, keys[:4], tokens[:8])]),
        ([], [(keys[3], root, False, keys[4:8], tokens[8:16])]),
        ([], [(keys[7], root, False, keys[8:], tokens[16:])]),
    ]


def test_keys_are_the_same_in_every_engine_and_differ_by_salt() -> None:
    def keys(salt: str) -> list[int]:
        sequences = Sequences(8, PAGE, 10)
        watch = sequences.tree.watch()
        compute(sequences, [1, 2, 3, 4, 5], salt)
        ((_, root, _, keys, _),) = watch.take(8)[1]
        assert sequences.tree.watch_salts().add_salts([salt]) == [root]
        return [root, *keys]

    assert keys("") == keys("")
    assert keys("a") == keys("a")
    assert len({*keys(""), *keys("a")}) == 6


def test_a_watch_keeps_its_cache() -> None:
    watch = Sequences(8, PAGE, 10).tree.watch()
    assert watch.take(8) == ([], [])
