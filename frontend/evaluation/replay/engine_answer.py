"""Answer of an engine, as its increments arrive."""

from __future__ import annotations

import asyncio
import time

from quire.frontend.evaluation.replay.phases import PhaseTrack
from quire.frontend.evaluation.replay.record import Outcome, RequestRecord, RunClock
from quire.protocol.messages import EngineCoreOutput, FinishReason

_ABORTED = (FinishReason.ABORT, FinishReason.TIMEOUT)


class EngineAnswer:
    """The record of one request, filled from the engine's increments. `ended` is a future that the caller sets."""

    __slots__ = ("_clock", "_phases", "_record", "ended")

    def __init__(self, record: RequestRecord, clock: RunClock) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._record = record
        self._clock = clock
        self._phases = PhaseTrack(record, clock)

    def take(self, output: EngineCoreOutput, timestamp: float) -> None:
        """Take an increment that has just arrived. This is on the path of each token."""
        record = self._record
        if output.events or self._phases.is_catching_up:
            self._phases.note(output, timestamp)
        if output.new_token_ids:
            now = time.monotonic() - self._clock.begin
            if record.last_token is None:
                record.first_token = now
                record.cached_tokens = output.num_cached_tokens
            else:
                record.gaps.append(now - record.last_token)
            record.last_token = now
            record.output_tokens += len(output.new_token_ids)
        if output.finish_reason is not None:
            self._finish(output, output.finish_reason)

    def fail(self, error: str) -> None:
        """End the request for a reason that did not come from the engine."""
        self._record.outcome, self._record.error = Outcome.ERRORED, error

    def leave(self) -> None:
        """End the current phase: no more increments are taken."""
        self._phases.end(self._clock.now())

    def _finish(self, output: EngineCoreOutput, reason: FinishReason) -> None:
        record = self._record
        if reason is FinishReason.ERROR:
            record.outcome = Outcome.of_error(output.error_kind)
            record.error = output.error or "the engine gave no reason"
        elif reason in _ABORTED:
            record.outcome = Outcome.LATE if reason is FinishReason.TIMEOUT else Outcome.ERRORED
            record.error = f"the engine ended it: {reason}"
        else:
            record.outcome = Outcome.COMPLETED
