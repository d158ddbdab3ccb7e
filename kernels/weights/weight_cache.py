"""Disk cache of packed weights: later starts read a file instead of packing.

A file holds the matrices of one plan in order, as kernels read them, then a footer: the file's key, and the checksum of
each matrix. Its name is its key, a hash of the checkpoint and of how its matrices are packed, so a file is never stale
and is only replaced as a whole; it may be deleted at any time. While it is written it has another name and a lock, and
a concurrent start waits for the lock.

Files are read into the engine's own memory, not mapped: a file that is truncated or overwritten later cannot harm a
running engine, and the weights lie on huge pages, on the NUMA nodes of their threads.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from quire.kernels._native import Device, checksum
from quire.kernels.emit.layout import Dtypes
from quire.kernels.errors import ModelError
from quire.kernels.operands import Matrix, Operand
from quire.kernels.regular_files import open_regular
from quire.kernels.weights.quantization import Quantization

_LAYOUT = 5
"""Version of the file's contents; increase it whenever a checkpoint would be packed into other bytes, as by another
trial (trial.py)."""

_KEY_BYTES = 16

logger = logging.getLogger(__name__)


class DamagedFileError(Exception):
    """A file of the cache that cannot be used. The message continues the file's name."""


@dataclass(frozen=True)
class CacheFile:
    """The file of a checkpoint's matrices, and the memory of `device` that they are read into or written from."""

    path: Path
    key: bytes
    device: Device
    addresses: Mapping[Operand, int]
    sizes: Mapping[Matrix, int]
    """Bytes of each matrix, in the order of the file."""

    @property
    def data_bytes(self) -> int:
        """Bytes of all matrices."""
        return sum(self.sizes.values())

    @property
    def footer_bytes(self) -> int:
        """Bytes of the key, the checksums of the matrices, and the checksum of both."""
        return _KEY_BYTES + 8 * len(self.sizes) + 8

    def load(self, pack: Callable[[], None], progress: Callable[[int], None]) -> None:
        """Read the matrices, or else `pack` them into memory and write the file for later starts.

        `progress` is called with the bytes of each matrix that is read. A damaged file is logged and replaced. Raises
        ModelError if the folder is unusable or full.
        """
        seen = self._identity()
        if self._read(progress):
            return
        with self._lock() as descriptor:
            if self._identity() != seen and self._read(progress):
                return  # the process that had the lock has written it
            self._reserve(descriptor)
            pack()
            self._write(descriptor)

    def _identity(self) -> tuple[int, int, int] | None:
        """Return what changes when another file takes the place of this one; None if there is none."""
        try:
            status = self.path.stat()
        except OSError:
            return None
        return status.st_ino, status.st_size, status.st_mtime_ns

    def _read(self, progress: Callable[[int], None]) -> bool:
        """Return False if there is no file, or a damaged one. The memory is as it was, or zero."""
        try:
            with open_regular(self.path) as file:
                try:
                    self._read_matrices(file.fileno(), progress)
                except (DamagedFileError, OSError) as error:
                    logger.warning("weight cache: %s %s; packing the checkpoint's weights again", self.path, error)
                    for matrix, size in self.sizes.items():
                        self.device.clear(self.addresses[matrix], size)
                    return False
        except FileNotFoundError:
            return False
        except OSError as error:
            raise self._unfit(error) from None
        return True

    def _read_matrices(self, descriptor: int, progress: Callable[[int], None]) -> None:
        expected = self.data_bytes + self.footer_bytes
        if (found := os.fstat(descriptor).st_size) != expected:
            raise DamagedFileError(f"has {found} bytes instead of {expected}")
        footer = os.pread(descriptor, self.footer_bytes, self.data_bytes)
        if footer[-8:] != _checksum(footer[:-8]):
            raise DamagedFileError("has a damaged footer")
        if footer[:_KEY_BYTES] != self.key:
            raise DamagedFileError("is the file of other weights")
        checksums = np.frombuffer(footer[_KEY_BYTES:-8], np.uint64)
        offset = 0
        for (matrix, size), stored in zip(self.sizes.items(), checksums, strict=True):
            if self.device.read_part(descriptor, offset, self.addresses[matrix], size) != stored:
                raise DamagedFileError(f"is damaged in {matrix.parts[0].tensor} (wrong checksum)")
            offset += size
            progress(size)

    @contextlib.contextmanager
    def _lock(self) -> Iterator[int]:
        """Open and lock the file under its other name, once no other process has the lock.

        Leftovers of a killed process are overwritten. A file that does not get its name is removed at the end.
        """
        partial = self.path.with_suffix(".partial")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = _open_locked(partial)
        except OSError as error:
            raise self._unfit(error) from None
        try:
            yield descriptor
        finally:
            if _is_open_at(partial, descriptor):
                partial.unlink(missing_ok=True)
            os.close(descriptor)

    def _reserve(self, descriptor: int) -> None:
        """Allocate the space now: a full disk is better reported before the weights are packed."""
        size, free = self.data_bytes + self.footer_bytes, shutil.disk_usage(self.path.parent).free
        if size > free:
            raise ModelError(
                f"weight cache {self.path.parent}: the packed weights take {size} bytes, but only {free} are free there"
            )
        try:
            os.truncate(descriptor, 0)
            os.posix_fallocate(descriptor, 0, size)
        except OSError as error:
            raise self._unfit(error) from None

    def _write(self, descriptor: int) -> None:
        """Write the matrices and the footer, and give the file its name. A failure is logged."""
        try:
            offset, footer = 0, self.key
            for matrix, size in self.sizes.items():
                written = self.device.write_part(descriptor, offset, self.addresses[matrix], size)
                footer += written.to_bytes(8, "little")
                offset += size
            os.pwrite(descriptor, footer + _checksum(footer), offset)
            self.path.with_suffix(".partial").rename(self.path)
        except OSError as error:
            logger.warning("weight cache: %s can't be written: %s; the next start packs again", self.path, error)

    def _unfit(self, error: OSError) -> ModelError:
        return ModelError(f"weight cache {self.path.parent}: {error.strerror}; choose another folder, or leave it out")


def key_of(quantization: Quantization, matrices: Sequence[Matrix], dtypes: Dtypes, model: str) -> bytes:
    """Return a hash of the checkpoint and of how its matrices are packed: by `model` too, if a trial of it decides."""
    described = repr((_LAYOUT, dtypes.weights, quantization.scheme, matrices, model)).encode()
    return hashlib.blake2b(quantization.checkpoint.digest() + described, digest_size=_KEY_BYTES).digest()


def _checksum(content: bytes) -> bytes:
    return checksum(np.frombuffer(content, np.uint8)).to_bytes(8, "little")


def _open_locked(partial: Path) -> int:
    while True:
        descriptor = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)  # other users may share it
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if _is_open_at(partial, descriptor):
            return descriptor
        os.close(descriptor)  # the process that had the lock has renamed or removed it


def _is_open_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False
