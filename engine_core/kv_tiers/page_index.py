"""The index of the pages in a page file: where each lies, and which is dropped next."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from quire.engine_core.kv_tiers.tier import Key


@dataclass(slots=True, eq=False)
class FilePage:
    """A page in the slot of this number: its keys, the checksum of its KV, and the time of its last use."""

    slot: int
    prefix: Key
    key: Key
    content: int
    last_use: int = 0


class PageIndex:
    """The pages of a file by key. Not thread-safe; every operation takes a time in proportion to its keys.

    A page is of no use without those before it, so only leaves are dropped, pages that no other one follows: the least
    recently used one first. Times count uses.
    """

    def __init__(self, num_slots: int, pages: Iterable[FilePage] = ()) -> None:
        """Begin with `pages` in slots below `num_slots`; of two with the same key the one used last counts."""
        self.num_evicted = 0
        self._pages = {page.key: page for page in sorted(pages, key=lambda page: page.last_use)}
        self._num_followers = Counter(page.prefix for page in self._pages.values())
        self._leaves = OrderedDict.fromkeys(key for key in self._pages if key not in self._num_followers)
        self._num_readers: Counter[Key] = Counter()
        self._clock = max((page.last_use for page in self._pages.values()), default=0)
        used = {page.slot for page in self._pages.values()}
        self._free = [slot for slot in reversed(range(num_slots)) if slot not in used]

    def __len__(self) -> int:
        return len(self._pages)

    def get(self, key: Key) -> FilePage | None:
        """Return the page of a key, if it is here."""
        return self._pages.get(key)

    def find(self, keys: Sequence[Key]) -> int:
        """Return how many of the first of these keys are here."""
        return next((count for count, key in enumerate(keys) if key not in self._pages), len(keys))

    def sample(self, count: int) -> list[FilePage]:
        """Return some pages, of those that have been here for long."""
        return list(islice(self._pages.values(), count))

    def touch(self, keys: Iterable[Key]) -> list[FilePage]:
        """Note a use of those of these keys that are here; return their pages."""
        self._clock += 1
        touched = [page for key in keys if (page := self._pages.get(key)) is not None]
        for page in touched:
            page.last_use = self._clock
            if page.key in self._leaves:
                self._leaves.move_to_end(page.key)
        return touched

    def hold(self, keys: Iterable[Key]) -> None:
        """Keep pages from being dropped while they are read; each call needs one of `release`."""
        self._num_readers.update(keys)

    def release(self, keys: Iterable[Key]) -> None:
        """Let pages be dropped again."""
        for key in keys:
            self._num_readers[key] -= 1
            if not self._num_readers[key]:
                del self._num_readers[key]

    def take_slot(self) -> int | None:
        """Return a slot to write to, whose page is dropped if it has one; None if all leaves are being read."""
        if not self._free:
            oldest = next((key for key in self._leaves if key not in self._num_readers), None)
            if oldest is None:
                return None
            self.remove(self._pages[oldest])
            self.num_evicted += 1
        return self._free.pop()

    def give_back(self, slot: int) -> None:
        """Return a slot that has been taken, and holds nothing."""
        self._free.append(slot)

    def give_up_free_slots(self) -> None:
        """Do with the slots that have pages, as there is no room for others."""
        self._free.clear()

    def add(self, page: FilePage) -> None:
        """Add the page of a slot that has been taken, whose key is not here."""
        self._clock += 1
        page.last_use = self._clock
        self._pages[page.key] = page
        self._num_followers[page.prefix] += 1
        self._leaves.pop(page.prefix, None)
        if page.key not in self._num_followers:
            self._leaves[page.key] = None

    def remove(self, page: FilePage) -> None:
        """Remove a page, whose slot may be taken then. No effect if it is not here."""
        if self._pages.get(page.key) is not page:
            return
        del self._pages[page.key]
        self._leaves.pop(page.key, None)
        self._free.append(page.slot)
        self._num_followers[page.prefix] -= 1
        if self._num_followers[page.prefix]:
            return
        del self._num_followers[page.prefix]
        if (parent := self._pages.get(page.prefix)) is not None:
            self._leaves[parent.key] = None
            # Those after it are the next to be dropped; if it has been used without them, it is as good as new.
            self._leaves.move_to_end(parent.key, last=parent.last_use > page.last_use)
