"""The index drops the page that was used least recently of those that no other one follows, and no page twice."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from quire.engine_core.kv_tiers.page_index import FilePage, PageIndex

LETTERS = "abc"


def keys(name: str) -> list[bytes]:
    """Return the keys of the pages of a prefix, which has one for each letter."""
    return [name[: end + 1].encode() for end in range(len(name))]


class Index(RuleBasedStateMachine):
    """Pages are named by their prefixes: `ab` follows `a`, which follows the empty one."""

    @initialize(num_slots=st.integers(1, 6))
    def start(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.index = PageIndex(num_slots)
        self.slots: dict[bytes, int] = {}
        self.held: list[list[bytes]] = []

    def leaves(self) -> set[bytes]:
        return self.slots.keys() - {name[:-1] for name in self.slots}

    @rule(name=st.text(LETTERS, min_size=1, max_size=4))
    def write(self, name: str) -> None:
        key = name.encode()
        if key in self.slots:
            return
        free, before = self.num_slots - len(self.slots), dict(self.slots)
        droppable = self.leaves() - {key for keys in self.held for key in keys}
        slot = self.index.take_slot()
        assert (slot is None) == (free == 0 and not droppable)
        if slot is None:
            return
        if free == 0:
            dropped = next(name for name, used in before.items() if used == slot)
            assert dropped in droppable
            del self.slots[dropped]
        assert slot not in self.slots.values()
        self.index.add(FilePage(slot, key[:-1], key, len(name)))
        self.slots[key] = slot

    @rule(name=st.text(LETTERS, min_size=1, max_size=4))
    def touch(self, name: str) -> None:
        assert {page.key for page in self.index.touch(keys(name))} == self.slots.keys() & set(keys(name))

    @rule(name=st.text(LETTERS, min_size=1, max_size=4))
    def hold(self, name: str) -> None:
        held = keys(name)[: self.index.find(keys(name))]
        self.index.hold(held)
        self.held.append(held)

    @rule()
    def release(self) -> None:
        if self.held:
            self.index.release(self.held.pop())

    @rule(name=st.text(LETTERS, min_size=1, max_size=2))
    def damage(self, name: str) -> None:
        page = self.index.get(name.encode())
        if page is not None:
            self.index.remove(page)
            self.index.remove(page)
            del self.slots[page.key]

    @rule()
    def restart(self) -> None:
        pages = [page for key in self.slots if (page := self.index.get(key)) is not None]
        self.index = PageIndex(self.num_slots, pages)
        self.held = []

    @invariant()
    def holds(self) -> None:
        assert len(self.index) == len(self.slots)
        for key, slot in self.slots.items():
            page = self.index.get(key)
            assert page is not None
            assert page.slot == slot
        for name in ("a", "abca", "cba"):
            found = self.index.find(keys(name))
            assert all(key in self.slots for key in keys(name)[:found])
            assert found == len(name) or keys(name)[found] not in self.slots


TestIndex = Index.TestCase


def fill(index: PageIndex, *names: str) -> None:
    for name in names:
        key, slot = name.encode(), index.take_slot()
        assert slot is not None
        index.add(FilePage(slot, key[:-1], key, 0))


def here(index: PageIndex, *names: str) -> str:
    return " ".join(name for name in names if index.get(name.encode()) is not None)


def test_the_least_recently_used_prefix_goes_from_its_end_to_its_beginning() -> None:
    index = PageIndex(6)
    fill(index, "a", "ab", "abc", "b", "bc", "bca")
    index.touch(keys("abc"))
    fill(index, "x")
    assert here(index, "a", "ab", "abc", "b", "bc", "bca") == "a ab abc b bc"
    fill(index, "y", "z")
    assert here(index, "a", "ab", "abc", "b", "bc", "bca") == "a ab abc"


def test_a_beginning_that_is_used_alone_outlives_older_pages() -> None:
    index = PageIndex(4)
    fill(index, "a", "ab", "b", "c")
    index.touch(keys("a"))
    fill(index, "x", "y")
    assert here(index, "a", "ab", "b", "c") == "a c"


def test_the_order_outlives_the_process() -> None:
    index = PageIndex(3)
    fill(index, "a", "b", "c")
    index.touch([b"a"])
    pages = [page for key in (b"c", b"a", b"b") if (page := index.get(key)) is not None]
    index = PageIndex(3, pages)
    fill(index, "x")
    assert here(index, "a", "b", "c", "x") == "a c x"


def test_of_two_pages_with_a_key_the_later_one_counts() -> None:
    index = PageIndex(3, [FilePage(0, b"", b"a", 1, last_use=5), FilePage(1, b"", b"a", 1, last_use=6)])
    page = index.get(b"a")
    assert page is not None
    assert page.slot == 1
    assert {index.take_slot(), index.take_slot()} == {0, 2}
