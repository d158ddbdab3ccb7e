"""The standard streams of a process that was started with some of them closed, as by `quire serve <&- >&-`."""

from __future__ import annotations

import os
import sys
from contextlib import suppress

_MODES = {"stdin": "r", "stdout": "w", "stderr": "w"}


def open_standard_streams() -> None:
    """Open those that are closed at the null device: what is opened later must not get their descriptors."""
    for descriptor, (name, mode) in enumerate(_MODES.items()):
        with suppress(OSError):
            os.fstat(descriptor)
            continue
        if os.open(os.devnull, os.O_RDWR) == descriptor:  # the lowest that is free
            os.set_inheritable(descriptor, True)
            setattr(sys, name, open(descriptor, mode, encoding="utf-8", closefd=False))  # noqa: SIM115
