"""Files in memory that engines inherit by their descriptors."""

from __future__ import annotations

import fcntl
import os

_LAST_STANDARD = 2


def memory_file(name: str) -> int:
    """Return the descriptor of a file in memory, never a standard one, which means something else to a child.

    It can be sealed by whoever has it.
    """
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    if descriptor > _LAST_STANDARD:
        return descriptor
    try:
        return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _LAST_STANDARD + 1)
    finally:
        os.close(descriptor)
