"""The files of the disk tier: a folder has two for each model, the pages and the index of what they are.

`NAME.pages` is an array of slots, each of which holds the KV of a page. `NAME.index` begins with a line that states the
model and the sizes, and then has a record for each slot: the two keys, the checksum of the KV, the time of last use,
and a checksum of all this. A record is erased before its slot is written, and written after it. Nothing is synced:
whatever a crash leaves, records and pages that do not have their checksum do not count.

A model's files are locked by the engine that uses them. Files of other models in the folder are deleted as far as they
take more than half of the space, the least recently used first, unless an engine uses them.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np

from quire.engine_core.kv_tiers.disk_index import DiskPage
from quire.kernels.runner import checksum

_VERSION = 1
HEADER_BYTES = 4096
_BLOCK_BYTES = 4096  # slots begin at multiples, as the blocks of file systems do
RECORD = struct.Struct("<32s32sQQ")
_RECORD_BYTES = RECORD.size + 8
_MAX_SLOTS = 1 << 22
_END_OF_TIME = 1 << 63  # no count of uses comes so far; from there on, it would leave its 64 bits
_RECORDS_AT_ONCE = 1 << 12


_NAME = re.compile(r"[0-9a-f]{32}\.index")


class UnusableFolderError(Exception):
    """A folder that cannot hold pages. The message says why."""


class FolderInUseError(UnusableFolderError):
    """A folder in which another engine uses the files of this model."""


class PageFile(Protocol):
    """Storage of pages in slots. All but `load` raise OSError."""

    num_slots: int
    replaced: str | None
    """Why earlier contents were discarded, if they were."""

    def load(self) -> Iterator[DiskPage]:
        """Yield the pages that are there."""

    def read(self, slot: int, page: int) -> int:
        """Read a slot into a page of KV memory; return the checksum of what was read."""

    def write(self, slot: int, page: int) -> None:
        """Write a page of KV memory, which may change meanwhile, to a slot."""

    def describe(self, page: DiskPage) -> None:
        """Write the record of a slot that has been written, or used again."""

    def erase(self, slot: int) -> None:
        """Erase the record of a slot."""

    def close(self) -> None:
        """Give the storage back; no thread uses it any more."""


class PageIO(Protocol):
    """Reads and writes pages of KV memory: see `Runner`."""

    @property
    def page_bytes(self) -> int:
        """Bytes of a page."""

    def read_page(self, page: int, descriptor: int, offset: int) -> int:
        """Read a page; return its checksum."""

    def write_page(self, page: int, descriptor: int, offset: int) -> None:
        """Write a page."""


class _Header(msgspec.Struct, frozen=True):
    version: int
    model: str
    page_bytes: int


class DiskFiles:
    """The two files of a model in a folder: a PageFile."""

    def __init__(self, folder: Path, max_bytes: int, model: str, pages: PageIO) -> None:
        """Open or make the files; all in the folder may take `max_bytes`. Raises UnusableFolderError."""
        self.num_slots = 0
        self.replaced: str | None = None
        self._folder = folder
        self._path = folder / f"{model}.index"
        self._pages = pages
        self._slot_bytes = -(-pages.page_bytes // _BLOCK_BYTES) * _BLOCK_BYTES
        self._descriptors: list[int] = []
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._index = self._open(self._path)
            self._data = self._open(self._path.with_suffix(".pages"))
            fcntl.flock(self._index, fcntl.LOCK_EX | fcntl.LOCK_NB)  # until this process ends, however it does
            self._choose_size(max_bytes)
            self._check_header(_Header(_VERSION, model, pages.page_bytes))
            os.truncate(self._index, HEADER_BYTES + self.num_slots * _RECORD_BYTES)
            if os.fstat(self._data).st_size > self.num_slots * self._slot_bytes:
                os.truncate(self._data, self.num_slots * self._slot_bytes)
        except BlockingIOError:
            self.close()
            raise FolderInUseError(f"{self._path} is used by another engine") from None
        except OSError as error:
            self.close()
            raise UnusableFolderError(f"{folder}: {error.strerror}") from None
        except UnusableFolderError:
            self.close()
            raise

    def load(self) -> Iterator[DiskPage]:
        """Yield the pages whose record is intact."""
        num_written = (os.fstat(self._data).st_size - self._pages.page_bytes) // self._slot_bytes + 1
        for first in range(0, min(num_written, self.num_slots), _RECORDS_AT_ONCE):
            count = min(_RECORDS_AT_ONCE, num_written - first, self.num_slots - first)
            records = os.pread(self._index, count * _RECORD_BYTES, HEADER_BYTES + first * _RECORD_BYTES)
            for number in range(len(records) // _RECORD_BYTES):
                record = records[number * _RECORD_BYTES : (number + 1) * _RECORD_BYTES]
                slot = first + number
                if record[RECORD.size :] == checksum_of(record[: RECORD.size], slot):
                    page = DiskPage(slot, *RECORD.unpack_from(record))
                    if page.last_use < _END_OF_TIME:
                        yield page

    def read(self, slot: int, page: int) -> int:
        """Read a slot into a page of KV memory; return the checksum of what was read."""
        return self._pages.read_page(page, self._data, slot * self._slot_bytes)

    def write(self, slot: int, page: int) -> None:
        """Write a page of KV memory to a slot."""
        self._pages.write_page(page, self._data, slot * self._slot_bytes)

    def describe(self, page: DiskPage) -> None:
        """Write the record of a slot."""
        record = RECORD.pack(page.prefix, page.key, page.content, page.last_use)
        self._write_record(page.slot, record + checksum_of(record, page.slot))

    def erase(self, slot: int) -> None:
        """Erase the record of a slot."""
        self._write_record(slot, bytes(_RECORD_BYTES))

    def close(self) -> None:
        """Close the files."""
        while self._descriptors:
            os.close(self._descriptors.pop())

    def _open(self, path: Path) -> int:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._descriptors.append(descriptor)
        return descriptor

    def _choose_size(self, max_bytes: int) -> None:
        others = _make_room(self._folder, self._path, max_bytes // 2)
        self.num_slots = min((max_bytes - others) // (self._slot_bytes + _RECORD_BYTES), _MAX_SLOTS)
        if self.num_slots < 1:
            raise UnusableFolderError(
                f"{self._folder}: {max_bytes} bytes, of which other engines use {others}, hold no page of "
                f"{self._slot_bytes} bytes; give more"
            )

    def _check_header(self, header: _Header) -> None:
        """Discard what is in the files unless it is of this model and these sizes."""
        line = os.pread(self._index, HEADER_BYTES, 0).partition(b"\n")[0]
        with contextlib.suppress(ValueError, RecursionError):  # of msgspec: no JSON, no UTF-8, no header, or too deep
            if msgspec.json.decode(line, type=_Header) == header:
                return
        if os.fstat(self._index).st_size or os.fstat(self._data).st_size:
            self.replaced = f"{self._path} is damaged, or of another version; its pages are discarded"
        os.truncate(self._index, 0)
        os.truncate(self._data, 0)
        os.pwrite(self._index, msgspec.json.encode(header) + b"\n", 0)

    def _write_record(self, slot: int, record: bytes) -> None:
        os.pwrite(self._index, record, HEADER_BYTES + slot * _RECORD_BYTES)


def checksum_of(record: bytes, slot: int) -> bytes:
    """Return the checksum of the record of a slot, which follows it in the file."""
    return checksum(np.frombuffer(record + slot.to_bytes(8, "little"), np.uint8)).to_bytes(8, "little")


def _make_room(folder: Path, own: Path, max_bytes: int) -> int:
    """Delete files of other models until they take `max_bytes`, if possible; return the bytes that they take then."""
    others = [path for path in folder.iterdir() if _NAME.fullmatch(path.name) and path != own]
    total = 0
    for path in sorted(others, key=lambda path: path.stat().st_mtime, reverse=True):
        files = [path, path.with_suffix(".pages")]
        size = sum(file.stat().st_blocks * 512 for file in files if file.exists())
        if total + size > max_bytes and not _is_in_use(path):
            for file in files:
                file.unlink(missing_ok=True)
        else:
            total += size
    return total


def _is_in_use(path: Path) -> bool:
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
