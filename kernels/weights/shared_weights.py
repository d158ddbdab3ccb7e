"""Packed weights that the engines of one machine share: a memfd, whose descriptor their supervisor hands to each.

The file holds the matrices of one plan and the tables of its positions, as kernels read them, then its key. The first
engine fills the file, while the others wait for its lock, and seals it: from then on no process can write to it or
shorten it. The seals also say that it is complete, so where an engine dies before, the next one fills it anew. The
others map it read-only.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
from collections.abc import Callable, Sequence

from quire.kernels._native import HUGE_PAGE, Device
from quire.kernels.emit.layout import Dtypes, round_up
from quire.kernels.errors import ModelError
from quire.kernels.operands import Matrix, Operand, RopeTable, TensorRows, Weight

WAITING = "waiting for another engine to pack the weights"
"""Task of `progress` that takes no time of this process."""

_ALIGNMENT = 4096
_KEY_BYTES = 16
_FUTURE_WRITE = 0x10  # F_SEAL_FUTURE_WRITE of Linux 5.1, which `fcntl` lacks
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | _FUTURE_WRITE

SharedWeight = Matrix | RopeTable | TensorRows
"""A weight that may be large. All others stay private to each engine."""


class SharedWeights:
    """The file `fd` with the weights of one plan, each at its place. Raises ModelError if it is unusable.

    `packing` names all that the bytes of the matrices depend on.
    """

    def __init__(self, fd: int, packing: bytes, weights: Sequence[Weight], dtypes: Dtypes) -> None:
        self.fd = fd
        self.is_complete = False
        self._address = 0
        self._places: dict[SharedWeight, int] = {}
        end = 0
        for weight in weights:
            if isinstance(weight, SharedWeight):
                self._places[weight] = end
                end += round_up(weight.bytes(dtypes) if isinstance(weight, Matrix) else weight.bytes, _ALIGNMENT)
        self._bytes = round_up(end + _KEY_BYTES, HUGE_PAGE)
        tables = repr([weight for weight in self._places if not isinstance(weight, Matrix)])
        self._key = hashlib.blake2b(packing + tables.encode(), digest_size=_KEY_BYTES).digest()

    @property
    def resident_bytes(self) -> int:
        """Bytes of memory that the weights take already."""
        return os.fstat(self.fd).st_blocks * 512 if self.is_complete else 0

    def claim(self, progress: Callable[[str, int, int], None] | None = None) -> bool:
        """Wait until the weights are complete, or until this engine may fill the file.

        No other engine may from then on, until `complete`, or until this process ends. Return False if the file has
        other weights, which cannot be replaced.
        """
        try:
            os.set_inheritable(self.fd, False)
            if not _is_sealed(self.fd):
                _lock(self.fd, progress)
            self.is_complete = _is_sealed(self.fd)
            if not self.is_complete:
                os.truncate(self.fd, 0)  # an engine that was killed may have left something
                return True
            fcntl.lockf(self.fd, fcntl.LOCK_UN)
            return self._has_key()
        except OSError as error:
            raise self._unfit(error) from None

    def map(self, device: Device) -> dict[Operand, int]:
        """Return the addresses of the weights, in memory that is zero unless they are complete."""
        try:
            if not self.is_complete:
                os.truncate(self.fd, self._bytes)
            self._address = device.map_file(self.fd, self._bytes, not self.is_complete)
        except OSError as error:
            raise self._unfit(error) from None
        return {weight: self._address + place for weight, place in self._places.items()}

    def complete(self, device: Device) -> None:
        """Give the weights, which are in place, to the other engines."""
        try:
            device.make_read_only(self._address)
            os.pwrite(self.fd, self._key, self._bytes - _KEY_BYTES)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)
            fcntl.lockf(self.fd, fcntl.LOCK_UN)
        except OSError as error:
            raise self._unfit(error) from None
        self.is_complete = True

    def _has_key(self) -> bool:
        size = os.fstat(self.fd).st_size
        return size == self._bytes and os.pread(self.fd, _KEY_BYTES, size - _KEY_BYTES) == self._key

    def _unfit(self, error: OSError) -> ModelError:
        return ModelError(
            f"weights_fd={self.fd}: {error.strerror}; give a memfd with MFD_ALLOW_SEALING that the engine inherits, or "
            "leave it out"
        )


def _is_sealed(fd: int) -> bool:
    """Return True if the file is complete. Raises OSError for one that can never be."""
    seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    if seals & _SEALS == _SEALS:
        return True
    if seals:
        raise OSError(errno.EPERM, "the file has other seals")
    return False


def _lock(fd: int, progress: Callable[[str, int, int], None] | None) -> None:
    """Take the lock, which the system releases when this process ends; wait until no other process has it."""
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        if progress is not None:
            progress(WAITING, 0, 1)
        fcntl.lockf(fd, fcntl.LOCK_EX)
        if progress is not None:
            progress(WAITING, 1, 1)
