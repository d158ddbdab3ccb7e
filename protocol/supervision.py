"""The agreement of an engine's supervisor and its processes, beside the lines that they write each other."""

from __future__ import annotations

import os
import signal
import struct

GAVE_WAY = 75
"""Exit status of an engine that has given way to another one: not told to end, and not failed."""

CRASHES = frozenset(
    {signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT, signal.SIGTRAP, signal.SIGSYS}
)
"""Signals by which a process ends for what it does itself; others come from outside as a rule."""

_NOTE = struct.Struct("<q")


def note_death(journal: int, *, is_crash: bool) -> None:
    """Note at the start of the crash journal, a memfd, how the engine has died that has written it."""
    os.pwrite(journal, _NOTE.pack(is_crash), 0)
