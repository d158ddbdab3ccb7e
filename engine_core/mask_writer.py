"""Computes the masks of constrained requests while the model runs."""

from __future__ import annotations

import queue
import threading

from quire.engine_core.batch import Batch
from quire.engine_core.constraint import Constraint
from quire.kernels.runner import TokenMask

_HANDOFF_SECONDS = 5e-5  # what waking a thread costs: masks that take no longer are written at once


class MaskWriter:
    """A thread that writes masks in the order in which they are asked for; it starts when it is first needed."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[list[Constraint]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def begin(self, batch: Batch) -> list[tuple[int, TokenMask]]:
        """The masks of the tokens that a step draws, by row. Some are written only while it runs."""
        masks, due, seconds = [], [], 0.0
        for row, (request, count) in enumerate(zip(batch.requests, batch.counts, strict=False)):  # then come beams
            constraint = request.constraint
            if constraint is None or request.num_computed_tokens + count < request.num_tokens:
                continue
            masks.append((row, constraint.mask))
            if constraint.begin_mask():
                due.append(constraint)
                seconds += constraint.mask_seconds
        if seconds > _HANDOFF_SECONDS:
            self._hand_over(due)
        else:
            _write(due)
        return masks

    def _hand_over(self, due: list[Constraint]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="quire-masks", daemon=True)
            self._thread.start()
        self._queue.put(due)

    def _run(self) -> None:
        while True:
            _write(self._queue.get())


def _write(due: list[Constraint]) -> None:
    for constraint in due:
        constraint.write_mask()
