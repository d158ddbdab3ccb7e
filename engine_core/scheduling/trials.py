"""Trials: a request under which engines have died computes in steps of its own, in turn with all others.

So the next death tells whether that request is the cause. Nobody waits for the end of a trial, but for single steps;
and it ends once the request has got past the place where engines died.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from quire.engine_core.crash_journal import CrashJournal
from quire.engine_core.request import Request
from quire.engine_core.scheduling.batch import Batch
from quire.engine_core.validation import GuiltyError

logger = logging.getLogger(__name__)


class Trials:
    """The open requests under which engines have died, and whose turn a step is."""

    def __init__(self, journal: CrashJournal) -> None:
        self._journal = journal
        self._recorded: dict[Request, int] = {}  # with the tokens that it must compute
        self._suspects: dict[Request, None] = {}  # of these, those that are on trial
        self._has_tried = False  # in the step before

    def check(self, identity: int) -> None:
        """Raise GuiltyError if engines have died under a request so often that none should work on it any more."""
        record = self._journal.records.get(identity)
        if record is not None and record.is_guilty:
            text = (
                f"the engine has died whenever it worked on this request, {record.num_deaths} times, "
                f"{record.num_alone} of them in a step with no other; it is not tried again"
            )
            logger.warning("a request is rejected: %s", text)
            raise GuiltyError(text)

    def add(self, request: Request) -> None:
        """Take note of a new request."""
        record = self._journal.records.get(request.identity)
        if record is None:
            return
        self._recorded[request] = record.place
        if record.is_suspect:
            logger.info(
                "request %r of client %s is tried in steps of its own: %d engines have died in a step with it",
                request.request_id, request.client_id.hex(), record.num_deaths,
            )  # fmt: skip
            self._suspects[request] = None

    def remove(self, request: Request) -> None:
        """Forget a request that has ended, or has got past the place where engines died."""
        if self._recorded.pop(request, None) is not None:
            self._suspects.pop(request, None)
            self._journal.forget(request.identity)

    def next_alone(self, running: Iterable[Request]) -> Request | None:
        """Return the request that is to have the next step for itself; None if it is the others' turn."""
        if not self._suspects:
            return None
        on_trial = None if self._has_tried else next((each for each in running if each in self._suspects), None)
        self._has_tried = on_trial is not None
        return on_trial

    def without(self, requests: Iterable[Request]) -> Iterable[Request]:
        """Return those of the requests that are not on trial."""
        return [each for each in requests if each not in self._suspects] if self._suspects else requests

    def begin_step(self, batch: Batch) -> None:
        """Note what is about to be computed."""
        requests, starts, counts = batch.requests, batch.starts, batch.counts
        self._journal.begin_step(
            [request.identity for request in requests], [starts[row] + counts[row] for row in batch.rows]
        )

    def end_step(self, batch: Batch) -> None:
        """Note that it has been computed."""
        self._journal.end_step()
        if self._recorded:
            for request in batch.requests:
                if request.num_computed_tokens >= self._recorded.get(request, request.num_tokens + 1):
                    self.remove(request)
