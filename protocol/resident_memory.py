"""The resident memory of this process."""

from __future__ import annotations

import ctypes
import os

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class ResidentMemory:
    """VmRSS of this process, which counts shared memory and mapped files too."""

    def __init__(self) -> None:
        # Kept open, for when no more files may be opened.
        self._statm = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        os.close(self._statm)

    def read(self) -> int:
        """Return the bytes; it takes some microseconds."""
        return int(os.pread(self._statm, 256, 0).split()[1]) * _PAGE_BYTES


def trim_heap() -> None:
    """Give the free memory of malloc's heaps back to the system, where libc is glibc."""
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)
