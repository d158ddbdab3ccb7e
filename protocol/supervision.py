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

_HEAD = struct.Struct("<qq")  # of a crash journal, a memfd: was it a crash, and how many requests were in the step


def note_death(journal: int, *, is_crash: bool) -> bool:
    """Note in the crash journal how the engine has died that has written it.

    Return True if it died in a step of a single request, which explains the death.
    """
    head = os.pread(journal, _HEAD.size, 0)
    if len(head) < _HEAD.size:
        return False  # it has died before it wrote any
    _, num_in_step = _HEAD.unpack(head)
    os.pwrite(journal, _HEAD.pack(is_crash, num_in_step), 0)
    return bool(num_in_step == 1)
