"""Page files: slots that hold the KV of a page each, and an index of what they are.

The index begins with a line that states the model and the sizes, and then has a record for each slot: the two keys, the
checksum of the KV, the time of last use, and a checksum of all this. A record is erased before its slot is written, and
written after it. Nothing is synced: whatever a crash leaves, records and pages that do not have their checksum do not
count.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from quire.engine_core.kv_tiers.page_index import FilePage
from quire.kernels.runner import checksum

MAX_SLOTS = 1 << 17
"""Most pages of a file: the index in memory takes some 500 bytes for each."""

VERSION = 1
HEADER_BYTES = 4096
RECORD = struct.Struct("<32s32sQQ")
RECORD_BYTES = RECORD.size + 8
BLOCK_BYTES = 4096
"""Slots begin at multiples, as the blocks of file systems do."""

_END_OF_TIME = 1 << 63  # no count of uses comes so far; from there on, it would leave its 64 bits
_RECORDS_AT_ONCE = 1 << 12

Copy = npt.NDArray[np.uint8]
"""A copy of a page's KV, as `Runner.copy_page` makes it."""


class UnusableFileError(Exception):
    """A file, or the folder of some, that cannot hold pages. The message says why."""


class FileInUseError(UnusableFileError):
    """A file that another engine uses."""


class ShortFileError(Exception):
    """A slot that lies beyond the end of its file."""


class PageFile(Protocol):
    """Storage of pages in slots. All methods raise OSError."""

    num_slots: int
    replaced: str | None
    """Reason for which earlier contents were discarded; None if they were not, or had to be."""

    def load(self) -> Iterator[FilePage]:
        """Yield the pages that are there."""

    def read(self, slot: int, copy: Copy) -> None:
        """Read a slot. Raises ShortFileError too."""

    def write(self, slot: int, copy: Copy) -> None:
        """Write a slot."""

    def describe(self, page: FilePage) -> None:
        """Write the record of a slot that has been written, or used again."""

    def erase(self, slot: int) -> None:
        """Erase the record of a slot."""

    def is_gone(self) -> bool:
        """Return True if no later engine will find the storage."""

    def close(self) -> None:
        """Give the storage back; no thread uses it any more."""


class Disk(Protocol):
    """Operations on the files of pages: the functions of `os` with these names. All may raise OSError."""

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


class IndexHeader(msgspec.Struct, frozen=True, omit_defaults=True):
    """The first line of an index. `place` is host for a file in host memory, which has a layout of its own."""

    version: int
    model: str
    page_bytes: Annotated[int, msgspec.Meta(ge=1)]
    place: str = "disk"

    @classmethod
    def read(cls, disk: Disk, descriptor: int) -> IndexHeader | None:
        """Return the header of an index; None if it has none."""
        line = disk.pread(descriptor, HEADER_BYTES, 0).partition(b"\n")[0]
        try:
            return msgspec.json.decode(line, type=cls)
        except (ValueError, RecursionError):  # of msgspec: no JSON, no UTF-8, no header, or too deep
            return None


class SlotFile:
    """The index and the slots of a page file, by their descriptors, which may be the same."""

    def __init__(self, disk: Disk, page_bytes: int, data_start: int = 0) -> None:
        """`data_start`: where the slots begin in their file. The descriptors and `num_slots` are set later."""
        self._disk = disk
        self._page_bytes = page_bytes
        self._slot_bytes = slot_bytes(page_bytes)
        self._data_start = data_start
        self._index = self._data = -1
        self.num_slots = 0
        self.replaced: str | None = None

    def load(self) -> Iterator[FilePage]:
        """Yield the pages whose record is intact."""
        num_written = (self._data_bytes() - self._page_bytes) // self._slot_bytes + 1
        for first in range(0, min(num_written, self.num_slots), _RECORDS_AT_ONCE):
            count = min(_RECORDS_AT_ONCE, num_written - first, self.num_slots - first)
            records = self._disk.pread(self._index, count * RECORD_BYTES, HEADER_BYTES + first * RECORD_BYTES)
            for number in range(len(records) // RECORD_BYTES):
                record = records[number * RECORD_BYTES : (number + 1) * RECORD_BYTES]
                slot = first + number
                if record[RECORD.size :] == checksum_of(record[: RECORD.size], slot):
                    page = FilePage(slot, *RECORD.unpack_from(record))
                    if page.last_use < _END_OF_TIME:
                        yield page

    def read(self, slot: int, copy: Copy) -> None:
        """Read a slot."""
        done, left = 0, copy.data
        while done < len(left):
            count = self._disk.preadv(self._data, [left[done:]], self._offset(slot) + done)
            if count == 0:
                raise ShortFileError
            done += count

    def write(self, slot: int, copy: Copy) -> None:
        """Write a slot."""
        done, left = 0, copy.data
        while done < len(left):
            done += self._disk.pwrite(self._data, left[done:], self._offset(slot) + done)

    def describe(self, page: FilePage) -> None:
        """Write the record of a slot."""
        record = RECORD.pack(page.prefix, page.key, page.content, page.last_use)
        self._write_records(page.slot, record + checksum_of(record, page.slot))

    def erase(self, slot: int) -> None:
        """Erase the record of a slot."""
        self._write_records(slot, bytes(RECORD_BYTES))

    def _begin(self, header: IndexHeader) -> bool:
        """Discard what is in the files unless it is of this model and these sizes; return True if there was any."""
        if IndexHeader.read(self._disk, self._index) == header:
            return False
        has_contents = any(os.fstat(descriptor).st_size for descriptor in (self._index, self._data))
        for descriptor in (self._index, self._data):
            self._disk.truncate(descriptor, 0)
        self._disk.pwrite(self._index, msgspec.json.encode(header) + b"\n", 0)
        return has_contents

    def _data_bytes(self) -> int:
        """Return the bytes from the first slot to the end of its file."""
        return os.fstat(self._data).st_size - self._data_start

    def _offset(self, slot: int) -> int:
        return self._data_start + slot * self._slot_bytes

    def _write_records(self, slot: int, records: bytes) -> None:
        """Write records from that of a slot on."""
        self._disk.pwrite(self._index, records, HEADER_BYTES + slot * RECORD_BYTES)


def slot_bytes(page_bytes: int) -> int:
    """Return the bytes of a slot for pages of this size."""
    return -(-page_bytes // BLOCK_BYTES) * BLOCK_BYTES


def checksum_of(record: bytes, slot: int) -> bytes:
    """Return the checksum of the record of a slot, which follows it in the file."""
    return checksum(np.frombuffer(record + slot.to_bytes(8, "little"), np.uint8)).to_bytes(8, "little")
