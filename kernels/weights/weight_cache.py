"""Disk cache of packed weights: later starts map the file, and processes share it through the page cache.

A file holds the matrices of one plan in order, as kernels read them. Its name is a hash of the checkpoint and of how
its matrices are packed, so a file is never modified and never stale; it may be deleted at any time. While it is written
it has another name and a lock, and a concurrent start waits for the lock.
"""

from __future__ import annotations

import fcntl
import hashlib
import mmap
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from quire.kernels.emit.layout import Dtypes
from quire.kernels.errors import ModelError
from quire.kernels.operands import Matrix
from quire.kernels.weights.quantization import Quantization

_LAYOUT = 1
"""Version of the file's contents; increase it whenever a checkpoint would be packed into other bytes."""

_ALIGNMENT = 4096


@dataclass(frozen=True)
class PackedFile:
    """Mapped memory of matrices. Later starts find what was packed into a new file once it is committed."""

    addresses: dict[Matrix, int]
    mapping: mmap.mmap
    path: Path
    partial: Path | None = None
    lock: int = -1

    @property
    def is_new(self) -> bool:
        """True if the matrices are still to be packed."""
        return self.partial is not None

    def commit(self) -> None:
        """Give a new file its name. Raises ModelError if the disk fails."""
        if self.partial is not None:
            try:
                self.mapping.flush()
                self.partial.rename(self.path)
            except OSError as error:
                self.discard()
                raise _unfit(self.path.parent, error) from None
            os.close(self.lock)

    def discard(self) -> None:
        """Remove a new file."""
        if self.partial is not None:
            self.partial.unlink(missing_ok=True)
            os.close(self.lock)


def open_packed(folder: str, quantization: Quantization, matrices: Sequence[Matrix], dtypes: Dtypes) -> PackedFile:
    """Open or create the file of these matrices in `folder`. Raises ModelError if the folder is unusable."""
    offsets, size = _offsets(matrices, dtypes)
    partial, lock = None, -1
    try:
        path = Path(folder) / f"{_key(quantization, matrices, dtypes)}.packed"
        if not _is_whole(path, size):
            Path(folder).mkdir(parents=True, exist_ok=True)
            partial = path.with_suffix(".partial")
            lock = _lock(partial)
            if _is_whole(path, size):  # finished by the process that held the lock
                os.close(lock)
                partial, lock = None, -1
        if partial is None:
            with path.open("rb") as file:
                mapping = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
        else:
            _reserve(partial, lock, size)
            mapping = mmap.mmap(lock, size)
    except OSError as error:
        raise _unfit(Path(folder), error) from None
    start = np.frombuffer(mapping, np.uint8).ctypes.data
    return PackedFile({m: start + offset for m, offset in offsets.items()}, mapping, path, partial, lock)


def _unfit(folder: Path, error: OSError) -> ModelError:
    return ModelError(f"weight cache {folder}: {error.strerror}; choose another folder, or leave it out")


def _is_whole(path: Path, size: int) -> bool:
    return path.exists() and path.stat().st_size == size


def _offsets(matrices: Sequence[Matrix], dtypes: Dtypes) -> tuple[dict[Matrix, int], int]:
    """Return the offset of each matrix, and the size of the file."""
    offsets, end = {}, 0
    for matrix in matrices:
        offsets[matrix] = end
        end += -(-matrix.bytes(dtypes) // _ALIGNMENT) * _ALIGNMENT
    return offsets, end


def _key(quantization: Quantization, matrices: Sequence[Matrix], dtypes: Dtypes) -> str:
    described = repr((_LAYOUT, dtypes.weights, quantization.scheme, matrices)).encode()
    return hashlib.blake2b(quantization.checkpoint.digest() + described, digest_size=16).hexdigest()


def _lock(partial: Path) -> int:
    """Open and lock the partial file. Leftovers of a killed process are overwritten."""
    while True:
        descriptor = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)  # other users may share it
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if partial.exists() and os.path.samestat(partial.stat(), os.fstat(descriptor)):
            return descriptor
        if partial.with_suffix(".packed").exists():
            return descriptor  # the process that held the lock has finished it
        os.close(descriptor)


def _reserve(partial: Path, descriptor: int, size: int) -> None:
    """Allocate the space now: on a full disk, a write to the mapping would kill the process."""
    free = shutil.disk_usage(partial.parent).free
    if size > free:
        partial.unlink(missing_ok=True)
        os.close(descriptor)
        raise ModelError(
            f"weight cache {partial.parent}: the packed weights take {size} bytes, but only {free} are free there"
        )
    try:
        os.truncate(descriptor, 0)
        os.posix_fallocate(descriptor, 0, size)
    except OSError:
        partial.unlink(missing_ok=True)
        os.close(descriptor)
        raise
