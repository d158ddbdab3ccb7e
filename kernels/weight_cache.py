"""Packed weights kept on disk: the next start maps them, and processes share them through the page cache.

A file holds the matrices of one plan, one after the other, as kernels read them. Its name is a hash of the checkpoint
and of how its matrices are packed, so a file is never changed and never stale; who no longer needs it may delete it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import mmap
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from quire.kernels.checkpoint import Checkpoint
from quire.kernels.emit.layout import Numbers
from quire.kernels.errors import ModelError
from quire.kernels.operands import Matrix

_LAYOUT = 1
"""To be raised whenever packed bytes change their meaning (emit/layout.py)."""

_ALIGNMENT = 4096
_PARTIAL = ".partial"


@dataclass(frozen=True)
class PackedFile:
    """Mapped memory for matrices. What is packed into a new one is found by later starts once it is committed."""

    addresses: dict[Matrix, int]
    mapping: mmap.mmap
    path: Path
    partial: Path | None = None
    lock: int = -1

    @property
    def is_new(self) -> bool:
        """Whether the matrices are still to be packed."""
        return self.partial is not None

    def commit(self) -> None:
        """Gives a new file its name."""
        self.mapping.flush()
        self._end(lambda partial: partial.rename(self.path))

    def discard(self) -> None:
        """Removes a new file."""
        self._end(Path.unlink)

    def _end(self, action: Callable[[Path], object]) -> None:
        if self.partial is not None:
            with contextlib.suppress(FileNotFoundError):  # taken for abandoned in the moment before it was locked
                action(self.partial)
            os.close(self.lock)


def open_packed(folder: str, checkpoint: Checkpoint, matrices: Sequence[Matrix], numbers: Numbers) -> PackedFile:
    """The file of these matrices in `folder`, or a new one. Raises ModelError when the folder or its disk won't do."""
    offsets, size = _offsets(matrices, numbers)
    path = Path(folder) / f"{_key(checkpoint, matrices, numbers)}.packed"
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        _remove_abandoned(Path(folder))
        if path.exists() and path.stat().st_size == size:
            with path.open("rb") as file:
                mapping = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
            partial, lock = None, -1
        else:
            partial, lock = _reserve(Path(folder), size)
            mapping = mmap.mmap(lock, size)
    except OSError as error:
        raise ModelError(f"weight cache {folder}: {error.strerror}; choose another folder, or leave it out") from None
    start = np.frombuffer(mapping, np.uint8).ctypes.data
    return PackedFile({m: start + offset for m, offset in offsets.items()}, mapping, path, partial, lock)


def _offsets(matrices: Sequence[Matrix], numbers: Numbers) -> tuple[dict[Matrix, int], int]:
    """Where each matrix begins, and the size of the file."""
    offsets, end = {}, 0
    for matrix in matrices:
        offsets[matrix] = end
        end += -(-matrix.bytes(numbers) // _ALIGNMENT) * _ALIGNMENT
    return offsets, end


def _key(checkpoint: Checkpoint, matrices: Sequence[Matrix], numbers: Numbers) -> str:
    described = repr((_LAYOUT, numbers.weights, matrices)).encode()
    return hashlib.blake2b(checkpoint.digest() + described, digest_size=16).hexdigest()


def _reserve(folder: Path, size: int) -> tuple[Path, int]:
    """A locked file of zeros whose space is taken now: on a full disk, a write to the mapping would end the process."""
    free = shutil.disk_usage(folder).free
    if size > free:
        raise ModelError(f"weight cache {folder}: the packed weights take {size} bytes, but only {free} are free there")
    descriptor, name = tempfile.mkstemp(suffix=_PARTIAL, dir=folder)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        os.fchmod(descriptor, 0o644)  # other users may share it
        os.posix_fallocate(descriptor, 0, size)
    except OSError:
        os.close(descriptor)
        Path(name).unlink()
        raise
    return Path(name), descriptor


def _remove_abandoned(folder: Path) -> None:
    """Deletes what processes that were killed left behind; those still at work hold a lock."""
    for path in folder.glob(f"*{_PARTIAL}"):
        with path.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            path.unlink(missing_ok=True)
