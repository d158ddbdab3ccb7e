"""A request while an engine serves it."""

from __future__ import annotations

import asyncio
import time

from quire.frontend.evaluation.replay.clock import Clock
from quire.frontend.evaluation.replay.phases import PhaseTrack
from quire.frontend.evaluation.replay.record import Outcome, RequestRecord
from quire.protocol.messages import EngineCoreOutput, FinishReason

_CUT_SHORT = (FinishReason.ABORT, FinishReason.TIMEOUT)


class Served:
    """Fills the record of one request from the engine's increments; `ended` is the loop's, and set from outside."""

    __slots__ = ("_clock", "_phases", "_record", "ended")

    def __init__(self, record: RequestRecord, clock: Clock) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._record = record
        self._clock = clock
        self._phases = PhaseTrack(record, clock)

    def take(self, output: EngineCoreOutput, timestamp: float) -> None:
        """Take an increment, which has arrived now. This is on the path of each token."""
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
        """End it for a reason that the engine did not tell."""
        self._record.outcome, self._record.error = Outcome.ERRORED, error

    def leave(self) -> None:
        """Nobody listens any more: what phase it is in ends now."""
        self._phases.end(self._clock.now())

    def _finish(self, output: EngineCoreOutput, reason: FinishReason) -> None:
        record = self._record
        if reason is FinishReason.ERROR:
            record.outcome = Outcome.of_error(output.error_kind)
            record.error = output.error or "the engine gave no reason"
        elif reason in _CUT_SHORT:
            record.outcome = Outcome.LATE if reason is FinishReason.TIMEOUT else Outcome.ERRORED
            record.error = f"the engine ended it: {reason}"
        else:
            record.outcome = Outcome.COMPLETED
