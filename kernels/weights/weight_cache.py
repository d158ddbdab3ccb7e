"""Packed weights kept on disk: the next start maps them, and processes share them through the page cache.

A file holds the matrices of one plan, one after the other, as kernels read them. Its name is a hash of the checkpoint
and of how its matrices are packed, so a file is never changed and never stale; who no longer needs it may delete it.
While it is written it has another name and a lock, on which a second start waits.
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

from quire.kernels.emit.layout import Numbers
from quire.kernels.errors import ModelError
from quire.kernels.operands import Matrix
from quire.kernels.weights.quantization import Quantization

_LAYOUT = 1
"""To be raised whenever a checkpoint would be packed into other bytes: by their layout or by how they are chosen."""

_ALIGNMENT = 4096


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
        """Gives a new file its name. Raises ModelError when the disk won't do."""
        if self.partial is not None:
            try:
                self.mapping.flush()
                self.partial.rename(self.path)
            except OSError as error:
                self.discard()
                raise _unfit(self.path.parent, error) from None
            os.close(self.lock)

    def discard(self) -> None:
        """Removes a new file."""
        if self.partial is not None:
            self.partial.unlink(missing_ok=True)
            os.close(self.lock)


def open_packed(folder: str, quantization: Quantization, matrices: Sequence[Matrix], numbers: Numbers) -> PackedFile:
    """The file of these matrices in `folder`, or a new one. Raises ModelError when the folder or its disk won't do."""
    offsets, size = _offsets(matrices, numbers)
    partial, lock = None, -1
    try:
        path = Path(folder) / f"{_key(quantization, matrices, numbers)}.packed"
        if not _is_whole(path, size):
            Path(folder).mkdir(parents=True, exist_ok=True)
            partial = path.with_suffix(".partial")
            lock = _lock(partial)
            if _is_whole(path, size):  # by the process that held the lock
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


def _offsets(matrices: Sequence[Matrix], numbers: Numbers) -> tuple[dict[Matrix, int], int]:
    """Where each matrix begins, and the size of the file."""
    offsets, end = {}, 0
    for matrix in matrices:
        offsets[matrix] = end
        end += -(-matrix.bytes(numbers) // _ALIGNMENT) * _ALIGNMENT
    return offsets, end


def _key(quantization: Quantization, matrices: Sequence[Matrix], numbers: Numbers) -> str:
    described = repr((_LAYOUT, numbers.weights, quantization.scheme, matrices)).encode()
    return hashlib.blake2b(quantization.checkpoint.digest() + described, digest_size=16).hexdigest()


def _lock(partial: Path) -> int:
    """The file that is to be packed, locked for this process. What a killed process left in it is overwritten."""
    while True:
        descriptor = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)  # other users may share it
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if partial.exists() and os.path.samestat(partial.stat(), os.fstat(descriptor)):
            return descriptor
        if partial.with_suffix(".packed").exists():
            return descriptor  # whoever held the lock has finished it
        os.close(descriptor)


def _reserve(partial: Path, descriptor: int, size: int) -> None:
    """Takes the space now: on a full disk, a write to the mapping would end the process."""
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
