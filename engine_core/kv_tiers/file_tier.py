"""A tier over a page file, on disk or in host memory: pages go there soon after they are full, and come back when a
request needs them.

Both happen on threads of their own. A page is copied out of KV memory, and not written if it has been evicted
meanwhile. A page that comes back is checked. A fetch that is cancelled touches KV memory no more, even if its read
hangs.
"""

from __future__ import annotations

import errno
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Protocol

import numpy as np

from quire.engine_core.averages import average
from quire.engine_core.kv_tiers.page_file import Copy, FileInUseError, PageFile, ShortFileError, UnusableFileError
from quire.engine_core.kv_tiers.page_index import FilePage, PageIndex
from quire.engine_core.kv_tiers.tier import Fetch, Key
from quire.protocol.host import HOST, Host

SealedPage = tuple[int, Key, Key, int]
"""Page, key of the prefix before it, key of the prefix that it ends, and its seal, a number that no other has."""

_PAGES_AT_ONCE = 16  # that a thread takes from the queue
NUM_READERS = 2  # threads that share each fetch: one copies at half the speed of memory
_WRITER_NICENESS = 10  # behind the threads that compute
_POLL_SECONDS = 0.2
_OPEN_SECONDS = 1.0  # that a start waits for the file
_RETRY_SECONDS = 2.0  # after which a file that was in use is tried again
_PAUSE_SECONDS = 30.0  # without writing, after a write has failed
_UPKEEP_SECONDS = 5.0  # between two times that times of use are written
_PROBE_SECONDS = 60.0  # after which the time of reads is measured anew
_PROBE_PAGES = 4
_BLEND = 0.2  # weight of a new measurement
_STOP_SECONDS = 5.0

logger = logging.getLogger(__name__)


class KvPages(Protocol):
    """The pages of KV memory: see `Runner`."""

    @property
    def page_bytes(self) -> int:
        """Bytes of a page."""

    def copy_page(self, page: int, copy: Copy) -> int:
        """Copy a page; return the checksum of the copy."""

    def fill_page(self, page: int, copy: Copy) -> int:
        """Fill a page that nobody else uses; return its checksum."""


class Sealed(Protocol):
    """The pages that were sealed, of which each tier has a queue: see the native `SealedQueue`."""

    @property
    def num_left_out(self) -> int:
        """Number of pages that `take` has left out, since it was called too rarely."""

    def take(self, most: int, seconds: float) -> list[SealedPage]:
        """Wait so long for a page to be sealed; return the oldest ones that have not been taken."""

    def is_sealed(self, page: int, seal: int) -> bool:
        """Return whether a page still has a seal, so that a copy made before is that of the sealed page."""


class _Reading:
    """A fetch that is being read; `lock` guards the rest, and its pages."""

    def __init__(self, fetch: Fetch, pages: Sequence[FilePage | None]) -> None:
        self.fetch = fetch
        self.pages = pages
        self.lock = threading.Lock()
        self.is_over = False
        self.has_come = [False] * len(pages)
        self.num_readers = NUM_READERS  # that have not read their share
        self.begun: float | None = None  # by the first reader

    def num_come(self) -> int:
        """Return how many of the first pages have come."""
        return next((count for count, has_come in enumerate(self.has_come) if not has_come), len(self.has_come))


class FileTier:
    """Pages in a file that `open_file` opens, those of `sealed`. Logs and statistics name the tier, as "disk".

    A file that can't be used, now or later, is logged and counted; there are fewer pages then, or none.
    """

    def __init__(
        self, name: str, open_file: Callable[[], PageFile], kv: KvPages, sealed: Sealed, host: Host = HOST
    ) -> None:
        self._name = name
        self._open_file = open_file
        self._kv = kv
        self._sealed = sealed
        self._host = host
        self._clock = host.monotonic
        self._lock = threading.Lock()  # of all that several threads write
        self._file: PageFile | None = None
        self._index = PageIndex(0)
        self._uses: dict[FilePage, None] = {}  # whose records are out of date
        self._backlog: deque[SealedPage] = deque()  # taken, and not written yet
        self._next_open: float | None = 0.0  # None: not again
        self._next_write = self._next_upkeep = self._next_probe = 0.0
        self._is_gone = False
        self._page_seconds = 0.0  # of a read; 0: not known yet
        self._num_slots = self._num_read = self._num_written = self._num_skipped = self._num_failures = 0
        self._read_seconds = 0.0
        self._readings: dict[Fetch, _Reading] = {}  # that are not over
        self._stuck: set[_Reading] = set()  # that were cancelled, and whose read goes on
        self._fetches: list[queue.SimpleQueue[_Reading | None]] = [host.queue() for _ in range(NUM_READERS)]
        self._stopping = host.event()
        self._opened = host.event()
        self._threads = [
            host.thread(f"quire-{name}-writer", self._write_all),
            *(host.thread(f"quire-{name}-reader", partial(self._read_all, reader)) for reader in range(NUM_READERS)),
        ]

    def start(self) -> None:
        """Start the threads, and wait a little until the file has been opened."""
        for thread in self._threads:
            thread.start()
        self._opened.wait(_OPEN_SECONDS)

    def stop(self) -> bool:
        """Write what is sealed, for some seconds at most, and end the threads; return False if one can't be ended."""
        self._stopping.set()
        for fetches in self._fetches:
            fetches.put(None)
        deadline = self._clock() + _STOP_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, deadline - self._clock()))
        has_ended = not any(thread.is_alive() for thread in self._threads)
        if has_ended and self._file is not None:
            self._file.close()
        return has_ended

    # On the step loop

    def find(self, keys: Sequence[Key]) -> int:
        """Return how many of the first of these pages there are; none while a read hangs."""
        with self._lock:
            return 0 if self._stuck else self._index.find(keys)

    def touch(self, keys: Sequence[Key]) -> None:
        """Note that a request uses these pages."""
        with self._lock:
            self._uses.update(dict.fromkeys(self._index.touch(keys)))

    def seconds(self, num_pages: int) -> float:
        """Return the likely time of a fetch, by the time that reads have taken; 0 before the first."""
        with self._lock:
            left = sum(len(reading.pages) - reading.num_come() for reading in self._readings.values())
            return (left + num_pages) * self._page_seconds

    def fetch(self, fetch: Fetch) -> None:
        """Begin to read pages."""
        with self._lock:
            reading = _Reading(fetch, [self._index.get(key) for key in fetch.keys])
            self._readings[fetch] = reading
            self._index.hold(fetch.keys)
        for fetches in self._fetches:
            fetches.put(reading)

    def cancel(self, fetch: Fetch) -> None:
        """End a fetch with what has come; its pages are not written any more."""
        with self._lock:
            if (reading := self._readings.pop(fetch, None)) is None:
                return
            self._stuck.add(reading)
        self._fail(f"reading {len(reading.pages)} pages took too long; those that have not come are computed")
        _hand_over(reading)

    def stats(self) -> dict[str, float]:
        """Return counters and gauges by name."""
        with self._lock:
            figures = {
                "pages": len(self._index),
                "pages_total": self._num_slots,
                "pages_read": self._num_read,
                "pages_written": self._num_written,
                "pages_evicted": self._index.num_evicted,
                "pages_skipped": self._num_skipped + self._sealed.num_left_out,
                "failures": self._num_failures,
                "read_seconds": self._read_seconds,
            }
        return {f"kv_{self._name}_{name}": value for name, value in figures.items()}

    # On the readers' threads

    def read(self, reading: _Reading, reader: int) -> None:
        """Read one reader's share of the pages of a fetch. Those after one that can't be read do not count."""
        with reading.lock:
            reading.begun = self._clock() if reading.begun is None else reading.begun
        try:
            self._read_pages(reading, range(reader, len(reading.pages), NUM_READERS))
        finally:
            with reading.lock:
                reading.num_readers -= 1
                is_last = reading.num_readers == 0
            if is_last:
                self._end(reading)

    def probe(self) -> None:
        """Measure the time of reads, if that has not been done for a while."""
        now = self._clock()
        with self._lock:
            pages = self._index.sample(_PROBE_PAGES) if now >= self._next_probe else []
            self._index.hold([page.key for page in pages])
        if not pages or self._file is None:
            return
        copy = self._new_copy()
        with suppress(OSError, ShortFileError):  # to be found again when it matters
            for page in pages:
                self._file.read(page.slot, copy)
            self._measure(self._clock() - now, len(pages))
        with self._lock:
            self._index.release([page.key for page in pages])

    def _end(self, reading: _Reading) -> None:
        num_come = reading.num_come()
        if num_come and reading.begun is not None:
            self._measure(self._clock() - reading.begun, num_come)
        with self._lock:
            self._index.release(reading.fetch.keys)
            self._num_read += num_come
            self._stuck.discard(reading)
            was_cancelled = self._readings.pop(reading.fetch, None) is None
        if not was_cancelled:
            _hand_over(reading)

    def _read_pages(self, reading: _Reading, numbers: range) -> None:
        """Read pages into pages of KV memory, up to the first one that can't be read."""
        copy = self._new_copy()
        for number in numbers:
            found = reading.pages[number]
            if found is None or self._file is None or not self._read_page(self._file, found, copy):
                return
            with reading.lock:
                if reading.is_over:
                    return
                is_intact = self._kv.fill_page(reading.fetch.pages[number], copy) == found.content
                reading.has_come[number] = is_intact
            if not is_intact:
                self._discard(found, "wrong checksum")
                return

    def _read_page(self, file: PageFile, found: FilePage, copy: Copy) -> bool:
        try:
            file.read(found.slot, copy)
        except ShortFileError:
            self._discard(found, "the file is too short")
        except OSError as error:
            self._fail(f"the page in slot {found.slot} can't be read ({error.strerror}); it is computed again")
        else:
            return True
        return False

    def _discard(self, found: FilePage, reason: str) -> None:
        """Forget a page that is damaged."""
        self._fail(f"the page in slot {found.slot} is damaged ({reason}); it is computed again")
        if self._file is not None:
            with suppress(OSError):
                self._file.erase(found.slot)
        with self._lock:
            self._index.remove(found)

    def _measure(self, seconds: float, num_pages: int) -> None:
        with self._lock:
            self._next_probe = self._clock() + _PROBE_SECONDS
            self._read_seconds += seconds
            self._page_seconds = average(self._page_seconds, seconds / num_pages, _BLEND)

    # On the writer's thread

    def open(self) -> None:
        """Open the file, if it is time to; it may be in use by an engine that is about to end."""
        if self._file is not None or self._next_open is None or self._clock() < self._next_open:
            return
        try:
            file = self._open_file()
            index = PageIndex(file.num_slots, file.load())
        except FileInUseError as error:
            if not self._next_open:
                self._fail(f"{error}; waiting for it to end")
            self._next_open = self._clock() + _RETRY_SECONDS
            return
        except (UnusableFileError, OSError) as error:
            self._next_open = None
            self._fail(f"{error}; going on without it")
            return
        if file.replaced is not None:
            self._fail(file.replaced)
        with self._lock:
            self._index, self._file, self._num_slots = index, file, file.num_slots
        logger.info("%s tier: %d of %d pages are there", self._name, len(index), file.num_slots)

    def write(self, pages: Iterable[SealedPage]) -> None:
        """Write pages that are not in the file yet. Those left when writing fails come first the next time."""
        self._backlog.extend(pages)
        copy = self._new_copy()
        while self._backlog and self._file is not None and self._can_write:
            if self._write_page(self._file, copy, *self._backlog[0]):
                self._backlog.popleft()

    def keep_up(self) -> None:
        """Write times of use now and then, and look whether the file is still there."""
        if self._file is None or not self._can_write or self._clock() < self._next_upkeep:
            return
        self._next_upkeep = self._clock() + _UPKEEP_SECONDS
        self._write_uses(self._file)
        if not self._is_gone and self._file.is_gone():
            self._is_gone = True
            self._fail("the files have been deleted; their pages go with this engine")

    @property
    def _can_write(self) -> bool:
        return self._file is not None and self._clock() >= self._next_write

    def _write_page(self, file: PageFile, copy: Copy, page: int, prefix: Key, key: Key, seal: int) -> bool:
        """Write a page if it can be; return False if it may be later."""
        with self._lock:
            if self._index.get(key) is not None:
                return True
        content = self._kv.copy_page(page, copy)
        is_that_page = self._sealed.is_sealed(page, seal)
        with self._lock:
            slot = self._index.take_slot() if is_that_page else None
            if slot is None:
                self._num_skipped += 1
                return True
        new = FilePage(slot, prefix, key, content)
        try:
            file.erase(slot)
            file.write(slot, copy)
            file.describe(new)
        except OSError as error:
            with self._lock:
                if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                    self._index.give_up_free_slots()
                else:
                    self._index.give_back(slot)
            self._pause(error)
            return False
        with self._lock:
            self._index.add(new)
            self._num_written += 1
        return True

    def _write_uses(self, file: PageFile) -> None:
        with self._lock:
            uses, self._uses = [page for page in self._uses if self._index.get(page.key) is page], {}
        try:
            for page in uses:  # only this thread gives a slot to another page
                file.describe(page)
        except OSError as error:
            self._pause(error)

    def _pause(self, error: OSError) -> None:
        self._next_write = self._clock() + _PAUSE_SECONDS
        self._fail(f"writing failed: {error.strerror}; trying again in {_PAUSE_SECONDS:g} s")

    # On any thread

    def _new_copy(self) -> Copy:
        return np.empty(self._kv.page_bytes, np.uint8)

    def _fail(self, words: str) -> None:
        with self._lock:
            self._num_failures += 1
        logger.warning("%s tier: %s", self._name, words)

    def _write_all(self) -> None:
        with suppress(OSError):  # this thread's alone
            self._host.renice(_WRITER_NICENESS)
        try:
            while not self._stopping.is_set():
                self.open()
                self._opened.set()
                if self._can_write:
                    self.write([] if self._backlog else self._sealed.take(_PAGES_AT_ONCE, _POLL_SECONDS))
                    self.keep_up()
                else:
                    self._stopping.wait(_POLL_SECONDS)
            deadline = self._clock() + _STOP_SECONDS / 2
            while self._can_write and self._clock() < deadline:
                if not (pages := self._sealed.take(_PAGES_AT_ONCE, 0.0)):
                    break
                self.write(pages)
            if self._file is not None and self._can_write:
                self._write_uses(self._file)
        except Exception:
            logger.exception("%s tier: the thread that writes has failed; no more pages are written", self._name)
            with self._lock:
                self._num_failures += 1

    def _read_all(self, reader: int) -> None:
        while not self._stopping.is_set():
            with suppress(queue.Empty):
                if (reading := self._fetches[reader].get(timeout=1.0)) is None:
                    return
                self._read_or_fail(reading, reader)
            if reader == 0:
                self.probe()

    def _read_or_fail(self, reading: _Reading, reader: int) -> None:
        try:
            self.read(reading, reader)
        except Exception:
            logger.exception("%s tier: a thread that reads has failed; some pages are computed", self._name)
            with self._lock:
                self._num_failures += 1


def _hand_over(reading: _Reading) -> None:
    """End a fetch with what has come."""
    with reading.lock:
        reading.is_over = True
    for page in reading.pages[: reading.num_come()]:
        assert page is not None
        reading.fetch.contents.append(page.content)
    reading.fetch.done(reading.fetch)
