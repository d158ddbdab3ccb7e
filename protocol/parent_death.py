"""The death of the process that has started this one, which the kernel tells: a child never outlives its owner.

The kernel takes the thread that started a child for its parent. So the owner starts children on a thread that lives as
long as itself (`quire.frontend.children`).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import threading
import time
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1  # see prctl(2)
_POLL_SECONDS = 0.5  # where the kernel has no pidfd


def end_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent dies, whatever it waits for then; at once if that is dead."""
    _ask_for(signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def outlive_parent(parent: int, leave: Callable[[], None]) -> None:
    """Call `leave`, on a thread, when the parent dies, instead of being killed; it is to end the process at once.

    The kernel continues a process that is stopped then, which could not notice it otherwise.
    """

    def watch() -> None:
        _wait_for_end(parent)
        leave()

    threading.Thread(target=watch, name="quire-parent", daemon=True).start()
    _ask_for(signal.SIGCONT)


def _ask_for(number: signal.Signals) -> None:
    with contextlib.suppress(AttributeError):  # not Linux
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(number))


def _wait_for_end(parent: int) -> None:
    """Wait until the parent is dead, which need not have been so only since now."""
    with contextlib.suppress(OSError, AttributeError):  # an old kernel, or it is dead
        descriptor = os.pidfd_open(parent)
        try:
            if os.getppid() == parent:  # else the number may be another process's by now
                poll = select.poll()
                poll.register(descriptor, select.POLLIN)
                poll.poll()
                return
        finally:
            os.close(descriptor)
    while os.getppid() == parent:
        time.sleep(_POLL_SECONDS)
