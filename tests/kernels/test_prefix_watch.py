"""Changes of the prefix cache: whoever follows them has what the cache has, however seldom they are taken."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from quire.kernels._native import SamplingConfig, Sequences

PAGE = 2
Path = tuple[int, ...]


class FollowedCache(RuleBasedStateMachine):
    """Sequences of few different tokens share pages and lose them; `known` is what the changes say."""

    def __init__(self) -> None:
        super().__init__()
        self.sequences = Sequences(12, PAGE, 10)
        self.open: list[int] = []
        self.ever: set[tuple[str, Path]] = set()
        self.known: dict[int, tuple[int | None, int | None, Path]] = {}
        self.is_current = False

    @initialize(tokens=st.lists(st.integers(0, 1), max_size=8))
    def begin(self, tokens: list[int]) -> None:
        """Watch a cache that may have pages already."""
        self.run("", tokens)
        self.sequences.tree.watch()

    @rule(salt=st.sampled_from(["", "a"]), tokens=st.lists(st.integers(0, 1), min_size=1, max_size=9))
    def run(self, salt: str, tokens: list[int]) -> None:
        """Compute a sequence, if there are pages for it."""
        self.is_current = False
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
        self.is_current = False
        self.sequences.tree.evict(count)

    @rule()
    def take(self) -> None:
        """Apply the changes as the docstring of PrefixChanges says."""
        removed, stored = self.sequences.tree.take_changes()
        for key in removed:
            del self.known[key]
        for parent, salt, keys, tokens in stored:
            assert len(tokens) == PAGE * len(keys)
            for number, key in enumerate(keys):
                assert key not in self.known
                assert parent is None or parent in self.known
                self.known[key] = parent, salt, tuple(tokens[PAGE * number : PAGE * (number + 1)])
                parent = key
        self.is_current = True

    def path(self, key: int) -> tuple[bool, Path]:
        """Return whether a known prefix is salted, and its tokens."""
        parent, salt, tokens = self.known[key]
        return (salt is not None, tokens) if parent is None else (salt is not None, (*self.path(parent)[1], *tokens))

    @invariant()
    def follows(self) -> None:
        """The known prefixes are those that the cache finds."""
        if not self.is_current:
            return
        tree, found = self.sequences.tree, set()
        for salt, path in self.ever:
            root = tree.enter(salt)
            if len(tree.match(root, list(path))) == len(path) // PAGE:
                found.add((bool(salt), path))
            tree.leave(root)
        assert {self.path(key) for key in self.known} == found
        assert len(self.known) == tree.size


FollowedCache.TestCase.settings = settings(max_examples=200, stateful_step_count=40)
TestFollowedCache = FollowedCache.TestCase


def test_what_came_and_went_is_not_told() -> None:
    sequences = Sequences(8, PAGE, 10)
    sequences.tree.watch()
    slot = sequences.open([1, 2, 3, 4, 5], 5, sampling=SamplingConfig(), cache_salt="")
    assert sequences.start(slot, 5) == 0
    sequences.share(slot, 4)
    sequences.close(slot)
    assert sequences.tree.evict(8) == 2
    assert sequences.tree.take_changes() == ([], [])


def test_keys_are_the_same_in_every_engine_and_differ_by_salt() -> None:
    def keys(salt: str) -> list[int]:
        sequences = Sequences(8, PAGE, 10)
        sequences.tree.watch()
        slot = sequences.open([1, 2, 3, 4, 5], 5, sampling=SamplingConfig(), cache_salt=salt)
        assert sequences.start(slot, 5) == 0
        sequences.share(slot, 4)
        ((_, _, keys, _),) = sequences.tree.take_changes()[1]
        return keys

    assert keys("") == keys("")
    assert keys("a") == keys("a")
    assert len({*keys(""), *keys("a")}) == 4
