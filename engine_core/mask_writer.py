"""Computes the masks of constrained requests while the model runs."""

from __future__ import annotations

import queue
import threading

from quire.engine_core.batch import Batch
from quire.engine_core.constraint import Constraint
from quire.engine_core.executor import RowMask
from quire.kernels.runner import Sequences

_SHORT_STEP = 1e-3  # seconds, in which a thread that is woken has hardly begun
_FEW_SECONDS = 2e-5  # of masks that are not worth waking a thread
_FEW_SECONDS_OF_SHORT_STEP = 1e-4


class MaskWriter:
    """A thread that writes masks in the order in which they are asked for; it starts when it is first needed.

    Most tokens need none: they are drawn first, and the grammar is asked whether it allows them. Masks that are likely
    to take little are written before the model runs: where all cores compute, a thread that is woken takes one of them
    away in the midst of a launch, and the others wait for it.
    """

    def __init__(self, sequences: Sequences) -> None:
        self._sequences = sequences
        self._queue: queue.SimpleQueue[list[Constraint] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def begin(self, batch: Batch, step_seconds: float) -> list[RowMask]:
        """The masks of the tokens that a step draws, by row, which may be written while it runs, for `step_seconds`.

        None for a token that is drawn ahead of its mask.
        """
        masks: list[RowMask] = []
        due: list[Constraint] = []
        seconds = 0.0
        for row, (request, count) in enumerate(zip(batch.requests, batch.counts, strict=False)):  # then come beams
            constraint = request.constraint
            if constraint is None or request.num_computed_tokens + count < request.num_tokens:
                continue
            if constraint.draws_from_all is None:
                constraint.draws_from_all = self._sequences.draws_from_all(request.slot)
            if constraint.may_guess:
                masks.append((row, None))
                continue
            masks.append((row, constraint.mask))
            if constraint.begin_mask():
                due.append(constraint)
                seconds += constraint.mask_seconds
        if seconds <= (_FEW_SECONDS if step_seconds > _SHORT_STEP else _FEW_SECONDS_OF_SHORT_STEP):
            _write(due)
        elif due:
            self._hand_over(due)
        return masks

    @staticmethod
    def write(constraint: Constraint) -> None:
        """Writes the mask at once."""
        if constraint.begin_mask():
            constraint.write_mask()

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
        if due is not None:
            _write(due)
        return due is not None


def _write(due: list[Constraint]) -> None:
    for constraint in due:
        constraint.write_mask()
