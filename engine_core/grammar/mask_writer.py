"""A thread that writes slow token masks before the sampler needs them."""

from __future__ import annotations

import queue
import threading

from quire.kernels.runner import Constraint

_LONG_SECONDS = 1e-4


class MaskWriter:
    """Writes masks in the order in which they are asked for; its thread starts when it is first needed.

    Most tokens need no mask, and the sampler's threads write fast masks themselves when they need them: where all cores
    compute, a thread that is woken takes one of them away in the middle of a step.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Constraint | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def prepare(self, constraint: Constraint) -> None:
        """Begin to write a constraint's mask, if that takes long."""
        if constraint.mask_seconds <= _LONG_SECONDS or not constraint.begin_mask():
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="quire-masks", daemon=True)
            self._thread.start()
        self._queue.put(constraint)

    def stop(self, seconds: float) -> bool:
        """End the thread once its queue is empty; return True if it ends within `seconds`."""
        if self._thread is None:
            return True
        self._queue.put(None)
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while self._write_next():
            pass

    def _write_next(self) -> bool:
        """Write the next mask; return False at the end. No constraint is kept alive while the thread sleeps."""
        constraint = self._queue.get()
        if constraint is not None:
            constraint.write_mask()
        return constraint is not None
