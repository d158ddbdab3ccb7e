"""Trials: a request under which engines have died computes in steps of its own, in turn with all others.

So the next death tells whether that request is the cause. Nobody waits for the end of a trial, but for single steps;
and it ends once the request has got past the place where engines died. What kills mostly does so at once: a request
that has no token yet is tried after the first death, one that has after the second.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from quire.engine_core.crash_journal import CrashJournal
from quire.engine_core.feature import Feature
from quire.engine_core.request import Request
from quire.engine_core.scheduling.batch import Batch
from quire.engine_core.validation import PoisonedRequestError, SuspendedTenantError
from quire.protocol.messages import EngineCoreRequest, FinishReason

_MOST_CONVICTIONS = 3  # of a tenant's requests within so many seconds, after which new ones are rejected
_MEMORY_SECONDS = 600.0

logger = logging.getLogger(__name__)


class Trials(Feature):
    """The open requests under which engines have died, and whose turn a step is."""

    def __init__(self, journal: CrashJournal, clock: Callable[[], float]) -> None:
        self._journal = journal
        self._clock = clock
        self._recorded: dict[Request, int] = {}  # with the tokens that it must compute
        self._suspects: dict[Request, int] = {}  # of these, those that are on trial, with their deaths
        self._has_tried = False  # in the step before

    def check(self, message: EngineCoreRequest) -> None:
        """Raise PoisonedRequestError if engines have died under a request so often that none should work on it again.

        Raise SuspendedTenantError for a new one of a tenant that has had several such requests. A client that names no
        tenant may speak for many, so it is never suspended.
        """
        record, tenant = self._journal.records.get(message.identity), message.tenant
        if record is not None and record.is_guilty:
            text = (
                f"the engine has died whenever it worked on this request, {record.num_deaths} times, "
                f"{record.num_alone} of them in a step with no other; it is not tried again"
            )
            logger.warning("a request is rejected: %s", text)
            if tenant:
                self._journal.convict(message.identity, tenant, self._clock())
            raise PoisonedRequestError(text)
        if tenant and not message.generated_token_ids:
            self._check_tenant(tenant)

    def _check_tenant(self, tenant: str) -> None:
        now = self._clock()
        times = self._journal.convictions_since(tenant, now - _MEMORY_SECONDS)
        if len(times) >= _MOST_CONVICTIONS:
            raise SuspendedTenantError(
                f"{len(times)} requests with this API key, or of this client, have killed the engine within "
                f"{_MEMORY_SECONDS / 60:g} minutes, and {_MOST_CONVICTIONS - 1} may; new ones are rejected for "
                f"{times[-_MOST_CONVICTIONS] + _MEMORY_SECONDS - now:.0f} s"
            )

    def add(self, request: Request) -> None:
        """Take note of a new request."""
        record = self._journal.records.get(request.message.identity)
        if record is None:
            return
        self._recorded[request] = record.place
        if record.is_suspect or not request.num_output_tokens:
            logger.info(
                "request %r of client %s is tried in steps of its own: %d engines have died in a step with it",
                request.request_id, request.client_id.hex(), record.num_deaths,
            )  # fmt: skip
            self._suspects[request] = record.num_deaths

    def remove(self, request: Request, reason: FinishReason | None, now: float) -> None:
        """Forget a request that has ended."""
        self._forget(request)

    def _forget(self, request: Request) -> None:
        """Forget a request that has ended, or has got past the place where engines died."""
        if self._recorded.pop(request, None) is not None:
            self._suspects.pop(request, None)
            self._journal.forget(request.message.identity)

    def choose_alone(self, running: Iterable[Request]) -> Request | None:
        """Return the request that is to have the next step for itself; None if it is the others' turn.

        The one with the most deaths comes first, so that it is the last that all others wait for.
        """
        if not self._suspects:
            return None
        on_trial = [] if self._has_tried else [each for each in running if each in self._suspects]
        self._has_tried = bool(on_trial)
        return max(on_trial, key=self._suspects.__getitem__, default=None)

    def may_share(self, running: Iterable[Request]) -> Iterable[Request]:
        """Return those of the running requests that are not on trial."""
        return [each for each in running if each not in self._suspects] if self._suspects else running

    def begin_step(self, batch: Batch) -> None:
        """Note what is about to be computed."""
        requests, starts, counts = batch.requests, batch.step.starts, batch.step.counts
        self._journal.begin_step(
            [request.message.identity for request in requests], [starts[row] + counts[row] for row in batch.rows]
        )

    def end_step(self, batch: Batch, seconds: float | None) -> None:
        """Note that it has been computed."""
        self._journal.end_step()
        if self._recorded:
            for request in batch.requests:
                if request.num_computed_tokens >= self._recorded.get(request, request.num_tokens + 1):
                    self._forget(request)
