"""Writes masks of constrained requests while the model runs, where they take long."""

from __future__ import annotations

import queue
import threading

from quire.engine_core.batch import Batch
from quire.engine_core.executor import RowRule
from quire.kernels.runner import Constraint

_LONG_SECONDS = 1e-4


class MaskWriter:
    """A thread that writes masks in the order in which they are asked for; it starts when it is first needed.

    Most tokens need none, and masks that take little are written by the threads that draw, when they need them: where
    all cores compute, a thread that is woken takes one of them away in the midst of a step.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[list[Constraint] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def rules(self, batch: Batch) -> list[RowRule]:
        """Of the tokens that a step draws, by row. The masks that take long are written from now on."""
        rules: list[RowRule] = []
        due: list[Constraint] = []
        for row, (request, count) in enumerate(zip(batch.requests, batch.counts, strict=False)):  # then come beams
            constraint = request.constraint
            if constraint is None or request.num_computed_tokens + count < request.num_tokens:
                continue
            rules.append((row, constraint))
            if constraint.mask_seconds > _LONG_SECONDS and constraint.begin_mask():
                due.append(constraint)
        if due:
            self._hand_over(due)
        return rules

    def stop(self, seconds: float) -> bool:
        """Ends the thread when it has written what it was asked for; whether it has ended within so many seconds."""
        if self._thread is None:
            return True
        self._queue.put(None)
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _hand_over(self, due: list[Constraint]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="quire-masks", daemon=True)
            self._thread.start()
        self._queue.put(due)

    def _run(self) -> None:
        while self._write_next():
            pass

    def _write_next(self) -> bool:
        """False at the end. What was written is not kept while the thread sleeps."""
        due = self._queue.get()
        for constraint in due or ():
            constraint.write_mask()
        return due is not None
