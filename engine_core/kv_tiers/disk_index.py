"""The index of the pages on disk: where each lies, and which is dropped next."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from quire.engine_core.kv_tiers.tier import Key

_FEW = 64  # stale entries that the heap may hold in any case


@dataclass(slots=True, eq=False)
class DiskPage:
    """A page on disk, in the slot of this number: its keys, the checksum of its KV, and the time of its last use."""

    slot: int
    prefix: Key
    key: Key
    content: int
    last_use: int = 0


class DiskIndex:
    """The pages on disk by key. Not thread-safe.

    A page is of no use without those before it, so only pages that no other one follows are dropped: the least recently
    used one first. Times count uses.
    """

    def __init__(self, num_slots: int, pages: Iterable[DiskPage] = ()) -> None:
        """Begin with `pages` in slots below `num_slots`; of two with the same key the one used last counts."""
        self.num_dropped = 0
        self._pages: dict[Key, DiskPage] = {}
        self._num_followers: Counter[Key] = Counter()  # by key
        self._num_readers: Counter[Key] = Counter()
        self._leaves: list[tuple[int, int, DiskPage]] = []  # a heap by last use; some are out of date
        for page in sorted(pages, key=lambda page: page.last_use):
            if (older := self._pages.pop(page.key, None)) is not None:
                self._num_followers[older.prefix] -= 1
            self._pages[page.key] = page
            self._num_followers[page.prefix] += 1
        self._clock = max((page.last_use for page in self._pages.values()), default=0)
        used = {page.slot for page in self._pages.values()}
        self._free = [slot for slot in reversed(range(num_slots)) if slot not in used]
        self._max_leaves = _FEW
        self._rebuild()

    def __len__(self) -> int:
        return len(self._pages)

    def get(self, key: Key) -> DiskPage | None:
        """Return the page of a key, if it is here."""
        return self._pages.get(key)

    def find(self, keys: Sequence[Key]) -> int:
        """Return how many of the first of these keys are here."""
        count = 0
        for key in keys:
            if key not in self._pages:
                break
            count += 1
        return count

    def touch(self, keys: Iterable[Key]) -> list[DiskPage]:
        """Note a use of those of these keys that are here; return their pages."""
        self._clock += 1
        touched = [page for key in keys if (page := self._pages.get(key)) is not None]
        for page in touched:
            page.last_use = self._clock
            self._offer(page)
        return touched

    def hold(self, keys: Iterable[Key]) -> None:
        """Keep pages from being dropped while they are read; each call needs one of `let_go`."""
        self._num_readers.update(keys)

    def let_go(self, keys: Iterable[Key]) -> None:
        """Let pages be dropped again."""
        for key in keys:
            self._num_readers[key] -= 1
            if not self._num_readers[key]:
                del self._num_readers[key]

    def take_slot(self) -> int | None:
        """Return a slot to write to, whose page is dropped if it has one; None if all pages are being read."""
        if not self._free:
            self._drop_oldest()
        return self._free.pop() if self._free else None

    def give_back(self, slot: int) -> None:
        """Return a slot that has been taken, and holds nothing."""
        self._free.append(slot)

    def add(self, page: DiskPage) -> None:
        """Add the page of a slot that has been taken, whose key is not here."""
        self._clock += 1
        page.last_use = self._clock
        self._pages[page.key] = page
        self._num_followers[page.prefix] += 1
        self._offer(page)

    def remove(self, page: DiskPage) -> None:
        """Remove a page that is damaged; its slot may be taken. No effect if it is not here."""
        if self._pages.get(page.key) is not page:
            return
        del self._pages[page.key]
        self._free.append(page.slot)
        self._num_followers[page.prefix] -= 1
        if not self._num_followers[page.prefix]:
            del self._num_followers[page.prefix]
            if (parent := self._pages.get(page.prefix)) is not None:
                self._offer(parent)

    def _drop_oldest(self) -> None:
        being_read = []
        while self._leaves and not self._free:
            entry = heapq.heappop(self._leaves)
            last_use, _, page = entry
            if not self._is_leaf(page) or page.last_use != last_use:
                continue
            if page.key in self._num_readers:
                being_read.append(entry)
                continue
            self.remove(page)
            self.num_dropped += 1
        for entry in being_read:
            heapq.heappush(self._leaves, entry)

    def _is_leaf(self, page: DiskPage) -> bool:
        return self._pages.get(page.key) is page and page.key not in self._num_followers

    def _offer(self, page: DiskPage) -> None:
        """Put a page into the heap if no other one follows it."""
        if page.key not in self._num_followers:
            heapq.heappush(self._leaves, (page.last_use, page.slot, page))
            if len(self._leaves) > self._max_leaves:
                self._rebuild()

    def _rebuild(self) -> None:
        self._num_followers = +self._num_followers
        self._leaves = [(page.last_use, page.slot, page) for page in self._pages.values() if self._is_leaf(page)]
        heapq.heapify(self._leaves)
        self._max_leaves = _FEW + 2 * len(self._leaves)
