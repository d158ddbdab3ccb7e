"""The resident memory of this process, and its heap."""

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


class _HeapInfo(ctypes.Structure):
    """`struct mallinfo2` of glibc."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in ("arena", "free", "small", "mmaps", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "top")
    )


def heap_bytes() -> int:
    """Return the bytes that malloc has handed out in this process; where libc can't tell, its resident memory."""
    if (info := getattr(ctypes.CDLL(None), "mallinfo2", None)) is None:
        return ResidentMemory().read()
    info.restype = _HeapInfo
    found = info()
    return int(found.uordblks + found.hblkhd)  # those in heaps, and those in mappings of their own


def trim_heap() -> None:
    """Give the free memory of malloc's heaps back to the system, where libc is glibc."""
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)
