"""The disk tier: pages go to disk soon after they are full, and come back when a request needs them.

Both happen on threads of their own. A page is written from where it lies in KV memory; if it has been evicted and
written anew meanwhile, the record that makes it count is left out. A page that comes back is checked.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from quire.engine_core.kv_tiers.disk_files import FolderInUseError, PageFile, UnusableFolderError
from quire.engine_core.kv_tiers.disk_index import DiskIndex, DiskPage
from quire.engine_core.kv_tiers.tier import Fetch, Key

SealedPage = tuple[int, int, Key, Key, int]
"""Page, generation, key of the prefix before it, key of the prefix that it ends, checksum of its KV."""

_PAGES_AT_ONCE = 16  # that a thread takes from the queue
_NUM_READERS = 2  # threads that share a fetch: one copies at half the speed of memory
_POLL_SECONDS = 0.2
_RETRY_SECONDS = 2.0  # after which a folder that was in use is tried again
_PAUSE_SECONDS = 30.0  # without writing, after a write has failed
_KEEP_USES_SECONDS = 5.0  # after which times of use are written
_TRUST_SECONDS = 60.0  # for which the measured time of reads counts
_BLEND = 0.2  # weight of a new measurement
_STOP_SECONDS = 5.0

logger = logging.getLogger(__name__)


class SealedPages(Protocol):
    """The pages of KV memory that have been sealed: see `Runner`."""

    def take_sealed(self, most: int, seconds: float) -> list[SealedPage]:
        """Wait so long for a page to be sealed; return the oldest ones that have not been taken."""

    def has_kept(self, page: int, generation: int) -> bool:
        """Return True if a sealed page has not been written since."""


class DiskTier:
    """Pages on disk, in a file that `open_file` opens.

    A file that can't be used, now or later, is logged and counted; there are fewer pages then, or none.
    """

    def __init__(
        self,
        open_file: Callable[[], PageFile],
        sealed: SealedPages,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._open_file = open_file
        self._sealed = sealed
        self._clock = clock
        self._lock = threading.Lock()  # of the index and the uses
        self._file: PageFile | None = None
        self._index = DiskIndex(0)
        self._uses: dict[DiskPage, None] = {}  # whose records are out of date
        self._next_open: float | None = None  # None: not again
        self._next_write = 0.0
        self._next_record_of_uses = 0.0
        self._num_fetching = 0  # pages
        self._read_seconds = 0.0
        self._page_seconds = 0.0  # of a read
        self._measured = 0.0
        self._num_slots = self._num_read = self._num_written = self._num_left_out = self._num_failures = 0
        self._map: Callable[..., Iterable[int]] = map
        self._fetches: queue.SimpleQueue[Fetch | None] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._threads = [
            threading.Thread(target=self._write_all, name="quire-disk-writer", daemon=True),
            threading.Thread(target=self._read_all, name="quire-disk-reader", daemon=True),
        ]
        self._open()

    def start(self) -> None:
        """Start the threads, which call `read` and `write`."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> bool:
        """Write what is sealed, for some seconds at most, and end the threads; return False if one can't be ended."""
        self._stopping.set()
        self._fetches.put(None)
        deadline = time.monotonic() + _STOP_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        has_ended = not any(thread.is_alive() for thread in self._threads)
        if has_ended and self._file is not None:
            self._file.close()
        return has_ended

    # On the step loop

    def find(self, keys: Sequence[Key]) -> int:
        """Return how many of the first of these pages there are."""
        with self._lock:
            return self._index.find(keys)

    def touch(self, keys: Sequence[Key]) -> None:
        """Note that a request uses these pages."""
        with self._lock:
            self._uses.update(dict.fromkeys(self._index.touch(keys)))

    def seconds(self, num_pages: int) -> float:
        """Return the likely time of a fetch; 0 if nothing is known."""
        if self._clock() - self._measured > _TRUST_SECONDS:
            return 0.0
        return (self._num_fetching + num_pages) * self._page_seconds

    def fetch(self, fetch: Fetch) -> None:
        """Begin to read pages."""
        with self._lock:
            self._index.hold(fetch.keys)
            self._num_fetching += len(fetch.keys)
        self._fetches.put(fetch)

    def cancel(self, _fetch: Fetch) -> None:
        """Go on: reading is short, and others may need the pages."""

    def stats(self) -> dict[str, float]:
        """Return counters and gauges by name."""
        with self._lock:
            return {
                "kv_disk_pages": len(self._index),
                "kv_disk_pages_total": self._num_slots,
                "kv_disk_pages_read": self._num_read,
                "kv_disk_pages_written": self._num_written,
                "kv_disk_pages_dropped": self._index.num_dropped,
                "kv_disk_pages_left_out": self._num_left_out,
                "kv_disk_failures": self._num_failures,
                "kv_disk_read_seconds": self._read_seconds,
            }

    # On threads

    def read(self, fetch: Fetch) -> None:
        """Read the pages of a fetch. Those after one that can't be read do not count."""
        begun = self._clock()
        with self._lock:
            found = [self._index.get(key) for key in fetch.keys]
        pairs = list(zip(found, fetch.pages, strict=True))
        shares = [pairs[first::_NUM_READERS] for first in range(_NUM_READERS)]
        shares_read = list(self._map(self._read_pages, shares))
        for i, page in enumerate(found):
            if page is None or i // _NUM_READERS >= shares_read[i % _NUM_READERS]:
                break
            fetch.contents.append(page.content)
        with self._lock:
            self._index.let_go(fetch.keys)
            self._num_fetching -= len(fetch.keys)
            self._num_read += len(fetch.contents)
            if fetch.contents:
                self._measure(self._clock() - begun, len(fetch.contents))
        fetch.done(fetch)

    def write(self, pages: Iterable[SealedPage]) -> None:
        """Write pages that are not on disk yet, and now and then the times of use."""
        now = self._clock()
        if self._file is None and self._next_open is not None and now >= self._next_open:
            self._open()
        for page in pages:
            if self._file is None or self._clock() < self._next_write:
                self._num_left_out += 1
            else:
                self._write_page(self._file, *page)
        if self._file is not None and now >= self._next_record_of_uses:
            self._next_record_of_uses = now + _KEEP_USES_SECONDS
            self._write_uses(self._file)

    def _open(self) -> None:
        try:
            file = self._open_file()
        except FolderInUseError as error:
            if self._next_open is None:
                logger.warning("disk tier: %s; waiting for it to end", error)
            self._num_failures += self._next_open is None
            self._next_open = self._clock() + _RETRY_SECONDS
            return
        except UnusableFolderError as error:
            self._num_failures += 1
            self._next_open = None
            logger.warning("disk tier: %s; going on without it", error)
            return
        if file.replaced is not None:
            self._num_failures += 1
            logger.warning("disk tier: %s", file.replaced)
        index = DiskIndex(file.num_slots, file.load())
        with self._lock:
            self._index, self._file, self._num_slots = index, file, file.num_slots
        logger.info("disk tier: %d of %d pages are there", len(index), file.num_slots)

    def _read_pages(self, pairs: Sequence[tuple[DiskPage | None, int]]) -> int:
        """Read pages into pages of KV memory, up to the first one that can't be read; return their number."""
        for count, (found, page) in enumerate(pairs):
            if found is None or self._file is None or not self._read_page(self._file, found, page):
                return count
        return len(pairs)

    def _read_page(self, file: PageFile, found: DiskPage, page: int) -> bool:
        try:
            if file.read(found.slot, page) == found.content:
                return True
            reason = "wrong checksum"
        except OSError as error:
            reason = str(error.strerror)
        self._num_failures += 1
        logger.warning("disk tier: the page in slot %d is damaged (%s); it is computed again", found.slot, reason)
        with self._lock:
            self._index.remove(found)
        return False

    def _write_page(self, file: PageFile, page: int, generation: int, prefix: Key, key: Key, content: int) -> None:
        with self._lock:
            if self._index.get(key) is not None:
                return
            slot = self._index.take_slot()
        if slot is None:
            self._num_left_out += 1
            return
        new = DiskPage(slot, prefix, key, content)
        is_written = False
        try:
            file.erase(slot)
            file.write(slot, page)
            if self._sealed.has_kept(page, generation):
                with self._lock:
                    self._index.add(new)
                is_written = True
                file.describe(new)
        except OSError as error:
            self._pause(error)
        with self._lock:
            if is_written:
                self._num_written += 1
            else:
                self._num_left_out += 1
                self._index.give_back(slot)

    def _write_uses(self, file: PageFile) -> None:
        with self._lock:
            uses, self._uses = list(self._uses), {}
        try:
            for page in uses:
                with self._lock:
                    is_here = self._index.get(page.key) is page
                if is_here:  # only this thread gives its slot to another page
                    file.describe(page)
        except OSError as error:
            self._pause(error)

    def _pause(self, error: OSError) -> None:
        self._num_failures += 1
        self._next_write = self._clock() + _PAUSE_SECONDS
        logger.warning("disk tier: writing failed: %s; trying again in %g s", error.strerror, _PAUSE_SECONDS)

    def _measure(self, seconds: float, num_pages: int) -> None:
        self._measured = self._clock()
        self._read_seconds += seconds
        known, new = self._page_seconds, seconds / num_pages
        self._page_seconds = known + _BLEND * (new - known) if known else new

    def _write_all(self) -> None:
        deadline = None
        while deadline is None or time.monotonic() < deadline:
            pages = self._sealed.take_sealed(_PAGES_AT_ONCE, 0.0 if self._stopping.is_set() else _POLL_SECONDS)
            self.write(pages)
            if self._stopping.is_set():
                if not pages:
                    break
                deadline = deadline or time.monotonic() + _STOP_SECONDS / 2
        if self._file is not None:
            self._write_uses(self._file)

    def _read_all(self) -> None:
        with ThreadPoolExecutor(_NUM_READERS, "quire-disk-reader") as readers:
            self._map = readers.map
            while (fetch := self._fetches.get()) is not None:
                self.read(fetch)
