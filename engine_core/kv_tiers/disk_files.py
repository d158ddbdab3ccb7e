"""The files of the disk tier: a folder has two for each model, the slots and the index of a page file.

`NAME.pages` is an array of slots, `NAME.index` their index: see page_file.py.

A model's files are locked by the engine that uses them. Those of other models are cut off or deleted as far as they
take more than half of the space, first those that were used least recently, unless an engine uses them.
"""

from __future__ import annotations

import fcntl
import os
import re
from pathlib import Path

from quire.engine_core.kv_tiers.page_file import (
    HEADER_BYTES,
    MAX_SLOTS,
    RECORD_BYTES,
    VERSION,
    Disk,
    FileInUseError,
    IndexHeader,
    SlotFile,
    UnusableFileError,
    slot_bytes,
)

_NAME = re.compile(r"[0-9a-f]{32}\.index")
_OPEN_ATTEMPTS = 10
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC


class DiskFiles(SlotFile):
    """The two files of a model in a folder: a PageFile."""

    def __init__(self, folder: Path, max_bytes: int, model: str, page_bytes: int, disk: Disk = os) -> None:
        """Open or make the files; all in the folder may take `max_bytes`. Raises UnusableFileError."""
        super().__init__(disk, page_bytes)
        self._path = folder / f"{model}.index"
        self._descriptors: list[int] = []
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._index = _open_locked(disk, self._path)
            self._descriptors.append(self._index)
            self._data = disk.open(_data_path(self._path), _FLAGS, 0o600)
            self._descriptors.append(self._data)
            self.num_slots = self._choose_size(max_bytes)
            if self._begin(IndexHeader(VERSION, model, page_bytes)):
                self.replaced = f"{self._path} is damaged, or of another version; its pages are discarded"
            disk.truncate(self._index, HEADER_BYTES + self.num_slots * RECORD_BYTES)
            if self._data_bytes() > self.num_slots * self._slot_bytes:
                disk.truncate(self._data, self.num_slots * self._slot_bytes)
        except OSError as error:
            self.close()
            raise UnusableFileError(f"{folder}: {error.strerror}") from None
        except UnusableFileError:
            self.close()
            raise

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
        if (num_slots := min((max_bytes - others) // (self._slot_bytes + RECORD_BYTES), MAX_SLOTS)) > 0:
            return num_slots
        raise UnusableFileError(
            f"{self._path.parent}: {max_bytes} bytes, of which other engines may use {others}, hold no page of "
            f"{self._slot_bytes} bytes; give more"
        )


def _data_path(index: Path) -> Path:
    return index.with_suffix(".pages")


def _open_locked(disk: Disk, path: Path) -> int:
    """Open or make an index and lock it until this process ends. Raises FileInUseError."""
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
    raise FileInUseError(f"{path} is used by another engine")


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
        except FileInUseError:
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
        header, size = IndexHeader.read(disk, file.fileno()), index.stat().st_size
    slots = (size - HEADER_BYTES) // RECORD_BYTES
    return size + (0 if header is None else slots * slot_bytes(header.page_bytes))


def _cut(disk: Disk, index: Path, descriptor: int, max_bytes: int) -> int:
    """Keep as many slots of files that no engine uses as fit, and return their bytes; delete the files if none does."""
    header, data = IndexHeader.read(disk, descriptor), _data_path(index)
    slot = 1 if header is None else slot_bytes(header.page_bytes)
    size = data.stat().st_size if data.exists() else 0
    slots = min(-(-size // slot), (max_bytes - HEADER_BYTES) // (slot + RECORD_BYTES))
    if header is None or slots < 1:
        data.unlink(missing_ok=True)
        index.unlink()
        return 0
    if slots * slot < size:
        os.truncate(data, slots * slot)
    disk.truncate(descriptor, HEADER_BYTES + slots * RECORD_BYTES)
    return HEADER_BYTES + slots * (RECORD_BYTES + slot)
