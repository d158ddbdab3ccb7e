"""The keys that a replica passes on are those of the prefixes that its engine's reports tell of."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prefix_reports import PrefixNumbers

from quire.frontend.ray import cached_prefixes
from quire.frontend.ray.cached_prefixes import CachedPrefixes, decode_keys
from quire.protocol.routing.prefix_outline import shared_page_keys

SIZE = 2
PROMPTS = st.lists(st.tuples(st.sampled_from(["", "x"]), st.lists(st.integers(0, 1), max_size=9)), max_size=9)


def _keys(cached: CachedPrefixes) -> list[int]:
    return decode_keys(cached.encode())


@given(PROMPTS)
def test_keys_come_and_go_with_the_reports(prompts: list[tuple[str, list[int]]]) -> None:
    cached, numbers = CachedPrefixes(SIZE), PrefixNumbers()
    present: dict[int, tuple[str, list[int]]] = {}
    for salt, tokens in prompts:
        keys = shared_page_keys(salt, tokens, SIZE)
        after = sum(key in present for key in keys) * SIZE
        cached.take(numbers.stored(tokens, SIZE, salt=salt, after=after))
        present.update({key: (salt, tokens[: (index + 1) * SIZE]) for index, key in enumerate(keys)})
        found = _keys(cached)
        assert len(found) == len(set(found))
        assert set(found) == set(present)
    while present:
        key, (salt, tokens) = max(present.items(), key=lambda item: len(item[1][1]))
        cached.take(numbers.removed(tokens, salt=salt))
        del present[key]
        assert set(_keys(cached)) == set(present)


def test_of_too_many_prefixes_the_shortest_are_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cached_prefixes, "MAX_KEYS", 5)
    cached, numbers = CachedPrefixes(SIZE), PrefixNumbers()
    prompts = [[first] * (8 * SIZE) for first in range(3)]
    for tokens in prompts:
        cached.take(numbers.stored(tokens, SIZE))
    keys = [shared_page_keys("", tokens, SIZE) for tokens in prompts]
    found = _keys(cached)
    assert len(found) == 5
    assert set(found[:3]) == {each[0] for each in keys}
    assert set(found[3:]) < {each[1] for each in keys}


def test_pages_after_one_that_is_not_known_are_left_out() -> None:
    cached, numbers = CachedPrefixes(SIZE), PrefixNumbers()
    cached.take(numbers.stored([1] * 8, SIZE, after=4))
    assert not _keys(cached)
    cached.take(numbers.stored([1] * 8, SIZE))
    assert len(_keys(cached)) == 4
    cached.clear()
    assert not _keys(cached)
