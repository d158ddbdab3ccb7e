"""The files of the disk tier: a folder has two for each model, the pages and the index of what they are.

`NAME.pages` is an array of slots, each of which holds the KV of a page. `NAME.index` begins with a line that states the
model and the sizes, and then has a record for each slot: the two keys, the checksum of the KV, the time of last use,
and a checksum of all this. A record is erased before its slot is written, and written after it. Nothing is synced:
whatever a crash leaves, records and pages that do not have their checksum do not count.

A model's files are locked by the engine that uses them. Those of other models are cut off or deleted as far as they
take more than half of the space, first those that were used least recently, unless an engine uses them.
"""

from __future__ import annotations

import fcntl
import os
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from quire.engine_core.kv_tiers.disk_index import DiskPage
from quire.kernels.runner import checksum

MAX_SLOTS = 1 << 17
"""Most pages of a folder: the index takes some 500 bytes of memory for each."""

_VERSION = 1
HEADER_BYTES = 4096
_NAME = re.compile(r"[0-9a-f]{32}\.index")
_BLOCK_BYTES = 4096  # slots begin at multiples, as the blocks of file systems do
RECORD = struct.Struct("<32s32sQQ")
_RECORD_BYTES = RECORD.size + 8
_END_OF_TIME = 1 << 63  # no count of uses comes so far; from there on, it would leave its 64 bits
_RECORDS_AT_ONCE = 1 << 12
_OPEN_ATTEMPTS = 10
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC

Copy = npt.NDArray[np.uint8]
"""A copy of a page's KV, as `Runner.copy_page` makes it."""


class UnusableFolderError(Exception):
    """A folder that cannot hold pages. The message says why."""


class FolderInUseError(UnusableFolderError):
    """A folder in which another engine uses the files of this model."""


class ShortFileError(Exception):
    """A slot that lies beyond the end of its file."""


class PageFile(Protocol):
    """Storage of pages in slots. All methods raise OSError."""

    num_slots: int
    replaced: str | None
    """Reason for which earlier contents were discarded; None if they were not."""

    def load(self) -> Iterator[DiskPage]:
        """Yield the pages that are there."""

    def read(self, slot: int, copy: Copy) -> None:
        """Read a slot. Raises ShortFileError too."""

    def write(self, slot: int, copy: Copy) -> None:
        """Write a slot."""

    def describe(self, page: DiskPage) -> None:
        """Write the record of a slot that has been written, or used again."""

    def erase(self, slot: int) -> None:
        """Erase the record of a slot."""

    def is_gone(self) -> bool:
        """Return True if no later engine will find the storage."""

    def close(self) -> None:
        """Give the storage back; no thread uses it any more."""


class Disk(Protocol):
    """File operations of DiskFiles: the functions of `os` with these names. All may raise OSError."""

    def open(self, path: Path, flags: int, mode: int, /) -> int:
        """Open or make a file; return its descriptor."""

    def close(self, descriptor: int, /) -> None:
        """Close a file."""

    def pread(self, descriptor: int, length: int, offset: int, /) -> bytes:
        """Read bytes of a file."""

    def preadv(self, descriptor: int, buffers: list[memoryview], offset: int, /) -> int:
        """Read into buffers; return how many bytes have come."""

    def pwrite(self, descriptor: int, data: bytes | memoryview, offset: int, /) -> int:
        """Write to a file; return how many bytes were written."""

    def truncate(self, descriptor: int, length: int, /) -> None:
        """Set the size of a file."""


class _IndexHeader(msgspec.Struct, frozen=True):
    version: int
    model: str
    page_bytes: Annotated[int, msgspec.Meta(ge=1)]


class DiskFiles:
    """The two files of a model in a folder: a PageFile."""

    def __init__(self, folder: Path, max_bytes: int, model: str, page_bytes: int, disk: Disk = os) -> None:
        """Open or make the files; all in the folder may take `max_bytes`. Raises UnusableFolderError."""
        self._disk = disk
        self.num_slots = 0
        self.replaced: str | None = None
        self._path = folder / f"{model}.index"
        self._page_bytes = page_bytes
        self._slot_bytes = _slot_bytes(page_bytes)
        self._descriptors: list[int] = []
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._index = _open_locked(disk, self._path)
            self._descriptors.append(self._index)
            self._data = disk.open(_data_path(self._path), _FLAGS, 0o600)
            self._descriptors.append(self._data)
            self.num_slots = self._choose_size(max_bytes)
            self._check_header(_IndexHeader(_VERSION, model, page_bytes))
            disk.truncate(self._index, HEADER_BYTES + self.num_slots * _RECORD_BYTES)
            if os.fstat(self._data).st_size > self.num_slots * self._slot_bytes:
                disk.truncate(self._data, self.num_slots * self._slot_bytes)
        except OSError as error:
            self.close()
            raise UnusableFolderError(f"{folder}: {error.strerror}") from None
        except UnusableFolderError:
            self.close()
            raise

    def load(self) -> Iterator[DiskPage]:
        """Yield the pages whose record is intact."""
        num_written = (os.fstat(self._data).st_size - self._page_bytes) // self._slot_bytes + 1
        for first in range(0, min(num_written, self.num_slots), _RECORDS_AT_ONCE):
            count = min(_RECORDS_AT_ONCE, num_written - first, self.num_slots - first)
            records = self._disk.pread(self._index, count * _RECORD_BYTES, HEADER_BYTES + first * _RECORD_BYTES)
            for number in range(len(records) // _RECORD_BYTES):
                record = records[number * _RECORD_BYTES : (number + 1) * _RECORD_BYTES]
                slot = first + number
                if record[RECORD.size :] == checksum_of(record[: RECORD.size], slot):
                    page = DiskPage(slot, *RECORD.unpack_from(record))
                    if page.last_use < _END_OF_TIME:
                        yield page

    def read(self, slot: int, copy: Copy) -> None:
        """Read a slot."""
        done, left = 0, copy.data
        while done < len(left):
            count = self._disk.preadv(self._data, [left[done:]], slot * self._slot_bytes + done)
            if count == 0:
                raise ShortFileError
            done += count

    def write(self, slot: int, copy: Copy) -> None:
        """Write a slot."""
        done, left = 0, copy.data
        while done < len(left):
            done += self._disk.pwrite(self._data, left[done:], slot * self._slot_bytes + done)

    def describe(self, page: DiskPage) -> None:
        """Write the record of a slot."""
        record = RECORD.pack(page.prefix, page.key, page.content, page.last_use)
        self._write_record(page.slot, record + checksum_of(record, page.slot))

    def erase(self, slot: int) -> None:
        """Erase the record of a slot."""
        self._write_record(slot, bytes(_RECORD_BYTES))

    def is_gone(self) -> bool:
        """Return True if the files have been deleted or replaced."""
        return not all(
            _is_open_at(path, descriptor)
            for path, descriptor in ((self._path, self._index), (_data_path(self._path), self._data))
        )

    def close(self) -> None:
        """Close the files."""
        while self._descriptors:
            self._disk.close(self._descriptors.pop())

    def _choose_size(self, max_bytes: int) -> int:
        others = _make_room(self._disk, self._path.parent, self._path, max_bytes // 2)
        if (num_slots := min((max_bytes - others) // (self._slot_bytes + _RECORD_BYTES), MAX_SLOTS)) > 0:
            return num_slots
        raise UnusableFolderError(
            f"{self._path.parent}: {max_bytes} bytes, of which other engines may use {others}, hold no page of "
            f"{self._slot_bytes} bytes; give more"
        )

    def _check_header(self, header: _IndexHeader) -> None:
        """Discard what is in the files unless it is of this model and these sizes."""
        if _read_header(self._disk, self._index) == header:
            return
        if os.fstat(self._index).st_size or os.fstat(self._data).st_size:
            self.replaced = f"{self._path} is damaged, or of another version; its pages are discarded"
        self._disk.truncate(self._index, 0)
        self._disk.truncate(self._data, 0)
        self._disk.pwrite(self._index, msgspec.json.encode(header) + b"\n", 0)

    def _write_record(self, slot: int, record: bytes) -> None:
        self._disk.pwrite(self._index, record, HEADER_BYTES + slot * _RECORD_BYTES)


def _slot_bytes(page_bytes: int) -> int:
    return -(-page_bytes // _BLOCK_BYTES) * _BLOCK_BYTES


def _data_path(index: Path) -> Path:
    return index.with_suffix(".pages")


def checksum_of(record: bytes, slot: int) -> bytes:
    """Return the checksum of the record of a slot, which follows it in the file."""
    return checksum(np.frombuffer(record + slot.to_bytes(8, "little"), np.uint8)).to_bytes(8, "little")


def _read_header(disk: Disk, descriptor: int) -> _IndexHeader | None:
    line = disk.pread(descriptor, HEADER_BYTES, 0).partition(b"\n")[0]
    try:
        return msgspec.json.decode(line, type=_IndexHeader)
    except (ValueError, RecursionError):  # of msgspec: no JSON, no UTF-8, no header, or too deep
        return None


def _open_locked(disk: Disk, path: Path) -> int:
    """Open or make an index and lock it until this process ends. Raises FolderInUseError."""
    for _ in range(_OPEN_ATTEMPTS):
        descriptor = disk.open(path, _FLAGS, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_open_at(path, descriptor):
                return descriptor
        except BlockingIOError:
            disk.close(descriptor)
            break
        disk.close(descriptor)  # another engine has deleted it meanwhile
    raise FolderInUseError(f"{path} is used by another engine")


def _is_open_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _make_room(disk: Disk, folder: Path, own: Path, max_bytes: int) -> int:
    """Make the files of other models take `max_bytes`, if possible; return the bytes that they may come to take."""
    others = [path for path in folder.iterdir() if _NAME.fullmatch(path.name) and path != own]
    total = 0
    for path in sorted(others, key=_time_of, reverse=True):
        try:
            descriptor = _open_locked(disk, path)
        except FolderInUseError:
            total += _planned_bytes(disk, path)
        except OSError:  # of another user
            continue
        else:
            total += _cut(disk, path, descriptor, max_bytes - total)
            disk.close(descriptor)
    return total


def _time_of(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:  # deleted by another engine
        return 0.0


def _planned_bytes(disk: Disk, index: Path) -> int:
    """Return the bytes that an engine may come to use, which has given its index a record for each slot."""
    with index.open("rb") as file:
        header, size = _read_header(disk, file.fileno()), index.stat().st_size
    slots = (size - HEADER_BYTES) // _RECORD_BYTES
    return size + (0 if header is None else slots * _slot_bytes(header.page_bytes))


def _cut(disk: Disk, index: Path, descriptor: int, max_bytes: int) -> int:
    """Keep as many slots of files that no engine uses as fit, and return their bytes; delete the files if none does."""
    header, data = _read_header(disk, descriptor), _data_path(index)
    slot = 1 if header is None else _slot_bytes(header.page_bytes)
    size = data.stat().st_size if data.exists() else 0
    slots = min(-(-size // slot), (max_bytes - HEADER_BYTES) // (slot + _RECORD_BYTES))
    if header is None or slots < 1:
        data.unlink(missing_ok=True)
        index.unlink()
        return 0
    if slots * slot < size:
        os.truncate(data, slots * slot)
    disk.truncate(descriptor, HEADER_BYTES + slots * _RECORD_BYTES)
    return HEADER_BYTES + slots * (_RECORD_BYTES + slot)
