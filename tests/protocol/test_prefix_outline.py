"""The outline of several prefix caches equals a naive model of them, and its size is bounded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from prefix_reports import Prefix, PrefixNumbers

from quire.protocol.messages import PrefixReport
from quire.protocol.routing.prefix_outline import PrefixOutline, page_keys, shared_page_keys

BLOCK_SIZES = {0: 2, 1: 2, 2: 3, 3: 2}
SALTS = st.sampled_from(["", "x"])
PROMPTS = st.lists(st.integers(0, 1), max_size=9)
KeysOf = Callable[[str, Sequence[int], int], list[int]]
ENGINES = st.sampled_from(sorted(BLOCK_SIZES))


def found(outline: PrefixOutline, salt: str, tokens: Sequence[int]) -> dict[int, int]:
    return outline.match(outline.prefixes(salt, tokens))


class Caches(RuleBasedStateMachine):
    """Engines with prefix caches, each of which reports every change; a cache has a prefix with all before it."""

    max_pages = 1000
    keys_of = staticmethod(page_keys)

    def __init__(self) -> None:
        super().__init__()
        self.numbers = PrefixNumbers()
        self.outline = PrefixOutline(self.max_pages, self.keys_of)
        self.caches: dict[int, set[Prefix]] = {}
        self.expected: list[tuple[int, Prefix]] = []  # prompts that an engine computes

    @rule(engine=ENGINES)
    def add(self, engine: int) -> None:
        """Also one that is there, which begins anew."""
        self.remove(engine)
        self.outline.add(engine, BLOCK_SIZES[engine])
        self.caches[engine] = set()
        self.report_nothing()

    @rule(engine=ENGINES)
    def remove(self, engine: int) -> None:
        self.outline.remove(engine)
        self.caches.pop(engine, None)
        self.expected = [each for each in self.expected if each[0] != engine]
        self.report_nothing()

    def report_nothing(self) -> None:
        """Give the outline occasion to drop what removed engines have left."""
        for engine in self.caches:
            self.outline.report(engine, PrefixReport())

    @rule(engine=ENGINES, salt=SALTS, tokens=PROMPTS, data=st.data())
    def store(self, engine: int, salt: str, tokens: list[int], data: st.DataObject) -> None:
        size, cache = BLOCK_SIZES[engine], self.caches.get(engine, set())
        after = data.draw(st.integers(0, len(tokens) // size)) * size
        while after and (salt, tuple(tokens[:after])) not in cache:
            after -= size
        cache.update((salt, tuple(tokens[:end])) for end in range(after + size, len(tokens) + 1, size))
        self.tell(engine, self.numbers.stored(tokens, size, salt=salt, after=after))

    @precondition(lambda self: any(self.caches.values()))
    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        """Evict a prefix that no other extends."""
        engine = data.draw(st.sampled_from(sorted(each for each, cache in self.caches.items() if cache)))
        cache, size = self.caches[engine], BLOCK_SIZES[engine]
        inner = {(salt, tokens[:-size]) for salt, tokens in cache}
        salt, tokens = data.draw(st.sampled_from(sorted(cache - inner)))
        cache.remove((salt, tokens))
        self.tell(engine, self.numbers.removed(tokens, salt=salt))

    @precondition(lambda self: self.caches)
    @rule(salt=SALTS, tokens=PROMPTS, data=st.data())
    def expect(self, salt: str, tokens: list[int], data: st.DataObject) -> None:
        engine = data.draw(st.sampled_from(sorted(self.caches)))
        self.outline.expect(engine, self.keys_of(salt, tokens, BLOCK_SIZES[engine]))
        self.expected.append((engine, (salt, tuple(tokens))))

    @precondition(lambda self: self.expected)
    @rule(data=st.data())
    def expect_no_more(self, data: st.DataObject) -> None:
        engine, (salt, tokens) = self.expected.pop(data.draw(st.integers(0, len(self.expected) - 1)))
        self.outline.expect_no_more(engine, self.keys_of(salt, tokens, BLOCK_SIZES[engine]))

    def tell(self, engine: int, report: PrefixReport) -> None:
        """Tell the outline what has changed in a cache."""
        self.outline.report(engine, report)

    def known(self, engine: int, salt: str, tokens: Sequence[int]) -> int:
        """Return how many of the first tokens an engine has, or computes."""
        size, count = BLOCK_SIZES[engine], 0
        while count + size <= len(tokens):
            prefix = tuple(tokens[: count + size])
            is_expected = any(
                other == engine and of == salt and computed[: len(prefix)] == prefix
                for other, (of, computed) in self.expected
            )
            if (salt, prefix) not in self.caches[engine] and not is_expected:
                break
            count += size
        return count

    @rule(salt=SALTS, tokens=PROMPTS)
    def match(self, salt: str, tokens: list[int]) -> None:
        known = {engine: self.known(engine, salt, tokens) for engine in self.caches}
        assert found(self.outline, salt, tokens) == {engine: count for engine, count in known.items() if count}

    @invariant()
    def has_each_page_once(self) -> None:
        pages = {(salt, tokens, BLOCK_SIZES[engine]) for engine, cache in self.caches.items() for salt, tokens in cache}
        assert len(self.outline) == len(pages) or not self.caches
        assert self.outline.num_left_out == 0


class ReplacedCaches(Caches):
    """Caches of which the outline is told all that they have, in the place of reports."""

    keys_of = staticmethod(shared_page_keys)

    def tell(self, engine: int, report: PrefixReport) -> None:
        """Tell the outline all that a cache has, the shortest prefixes first."""
        del report
        prefixes = sorted(self.caches.get(engine, ()), key=lambda prefix: len(prefix[1]))
        self.outline.replace(
            engine, [shared_page_keys(salt, tokens, BLOCK_SIZES[engine])[-1] for salt, tokens in prefixes]
        )


class FullOutline(Caches):
    """The same when there is no room for all: nothing is found that is not there, and it never holds more."""

    max_pages = 5

    def report_nothing(self) -> None:
        """Leave pages of removed engines as they are."""

    @rule(salt=SALTS, tokens=PROMPTS)
    def match(self, salt: str, tokens: list[int]) -> None:
        for engine, count in found(self.outline, salt, tokens).items():
            assert 0 < count <= self.known(engine, salt, tokens)

    @invariant()
    def has_each_page_once(self) -> None:
        assert len(self.outline) <= self.max_pages


TestCaches = Caches.TestCase
TestFullOutline = FullOutline.TestCase
TestReplacedCaches = ReplacedCaches.TestCase
TestCaches.settings = TestFullOutline.settings = settings(max_examples=20, stateful_step_count=40)
TestReplacedCaches.settings = TestCaches.settings


@given(st.lists(st.tuples(SALTS, PROMPTS), max_size=20), st.sampled_from([1, 2, 3]))
@pytest.mark.parametrize("keys_of", [page_keys, shared_page_keys])
def test_keys_are_equal_where_salts_and_prefixes_are(
    keys_of: KeysOf, prompts: list[tuple[str, list[int]]], size: int
) -> None:
    prefixes: dict[int, Prefix] = {}
    for salt, tokens in prompts:
        keys = keys_of(salt, tokens, size)
        assert len(keys) == len(tokens) // size
        for number, key in enumerate(keys, start=1):
            prefix = salt, tuple(tokens[: number * size])
            assert prefixes.setdefault(key, prefix) == prefix
    assert len(prefixes) == len(set(prefixes.values()))


def test_tokens_are_told_apart_over_their_whole_range() -> None:
    tokens = [0, 1, 255, 256, 2**16, 2**31 - 1]
    pairs = [[first, second] for first in tokens for second in tokens]
    for keys_of in (page_keys, shared_page_keys):
        assert len({keys_of("", pair, 2)[0] for pair in pairs}) == len(pairs)


def test_shared_keys_are_the_same_in_each_process() -> None:
    salt, tokens = "a salt", list(range(1000, 1100))
    code = f"from quire.protocol.routing.prefix_outline import *; print(shared_page_keys({salt!r}, {tokens}, 32))"
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        printed = subprocess.run([sys.executable, "-c", code], env=environment, check=True, capture_output=True).stdout
        assert json.loads(printed) == shared_page_keys(salt, tokens, 32)


def test_pages_that_find_no_room_are_counted_and_come_again_later() -> None:
    outline, numbers, tokens = PrefixOutline(max_pages=3), PrefixNumbers(), list(range(10))
    outline.add(0, 2)
    outline.add(1, 2)
    outline.report(0, numbers.stored(tokens, 2))
    assert (len(outline), outline.num_left_out) == (3, 2)
    outline.report(0, numbers.stored([*tokens, 10, 11], 2, after=10))  # what is before it is not known
    assert (len(outline), outline.num_left_out) == (3, 3)
    outline.report(1, numbers.stored(tokens[:6], 2))  # needs no more room
    assert found(outline, "", tokens) == {0: 6, 1: 6}
    outline.remove(0)
    outline.report(1, PrefixReport(removed=[numbers.of("", tokens[:6])]))
    outline.report(1, numbers.stored([*tokens[:4], 7, 7], 2, after=4))
    assert found(outline, "", [*tokens[:4], 7, 7]) == {1: 6}


def test_the_bookkeeping_of_an_outline_is_bounded_when_caches_change_for_ever() -> None:
    """Two engines number prefixes differently, so that the numbers of one outlive its pages."""
    outline = PrefixOutline(max_pages=10)
    for engine in range(2):
        outline.add(engine, 2)
    for round_ in range(200):
        tokens = [round_, 0, 0, 0]
        for number in (0, 1):
            first = 10**6 * number + 10 * round_
            report = PrefixReport(roots=[(number, "")], stored=[(number, [first, first + 1], tokens)])
            outline.report(number, report)
        for number in (0, 1):
            first = 10**6 * number + 10 * round_
            outline.report(number, PrefixReport(removed=[first + 1, first]))
    assert len(outline) == 0
    assert len(outline._keys) <= 20


def test_an_engine_is_removed_in_steps_that_are_short_however_many_pages_it_has() -> None:
    """Meanwhile nothing of it is found, and no other is taken for it."""
    outline, numbers = PrefixOutline(), PrefixNumbers()
    for engine in range(2):
        outline.add(engine, 1)
    for number in range(300):
        for engine in range(2):
            outline.report(engine, numbers.stored([number] * 40, 1))
    outline.report(0, numbers.stored([1000] * 40, 1))
    outline.remove(0)
    outline.add(0, 1)
    assert found(outline, "", [7] * 40) == {1: 40}
    assert found(outline, "", [1000] * 40) == {}
    outline.report(0, numbers.stored([7] * 40, 1))
    for _ in range(5):
        outline.report(1, PrefixReport())
    assert len(outline) == 300 * 40
    assert found(outline, "", [7] * 40) == {0: 40, 1: 40}
    outline.remove(1)
    assert found(outline, "", [7] * 40) == {0: 40}
    outline.add(2, 1)
    assert found(outline, "", [8] * 40) == {}


@pytest.mark.parametrize("engine", [0, 9])
def test_reports_of_engines_that_are_not_there_are_ignored(engine: int) -> None:
    outline, numbers = PrefixOutline(), PrefixNumbers()
    outline.add(0, 2)
    outline.remove(0)
    outline.report(engine, numbers.stored([1, 2], 2))
    outline.remove(engine)
    outline.add(1, 2)
    assert found(outline, "", [1, 2]) == {}
