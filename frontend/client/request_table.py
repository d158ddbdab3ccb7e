"""The table of a client's open requests, the one place where they start and end."""

from __future__ import annotations

import itertools
import math
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec

from quire.frontend.client.observer import Observer, OpenRequest
from quire.frontend.errors import EngineDeadError
from quire.protocol.errors import ProtocolError
from quire.protocol.messages import (
    MAX_ABORTED,
    Abort,
    ClientMessage,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    ErrorKind,
    FinishReason,
)

_LEAST_TIMEOUT = 1e-3  # seconds, of a request whose time is up while it is sent again
_IDENTITY_BITS = 63

FIRST_SESSION = 1
"""Number of a client's first session with an engine; each that follows has the next one."""


@dataclass(slots=True, eq=False)
class OpenCompletion:
    """A completion that has not ended. `last_increment` is when it last grew, None without observers."""

    request: OpenRequest
    index: int
    wire_id: str | None = None  # id in the present session; None: it is still to be sent
    last_increment: float | None = None
    identity: int = field(default_factory=lambda: secrets.randbits(_IDENTITY_BITS))  # id for all sessions


@dataclass(slots=True, eq=False)
class Submission:
    """An open request, with its open completions by index."""

    deadline: float
    is_aborted: bool = False  # the engine has been told to abort it, and may not have answered
    completions: dict[int, OpenCompletion] = field(default_factory=dict)

    @property
    def is_sent(self) -> bool:
        """Whether all completions are in the engine; the last is sent last."""
        return next(reversed(self.completions.values())).wire_id is not None

    @property
    def wire_ids(self) -> list[str]:
        """Ids of the completions that are in the engine."""
        return [completion.wire_id for completion in self.completions.values() if completion.wire_id is not None]


class RequestTable:
    """The table that sends requests to the engine and passes each increment to its request.

    A request outlives the engine that works on it: when the engine is gone, `suspend` takes everything back, and
    `resume` sends it to the next one, with the tokens that have been received.

    Wire ids are counters, never the user's ids: an output that was in flight when its request was aborted can
    then not be mistaken for one of a later request with the same id. Not thread-safe.
    """

    def __init__(
        self,
        send: Callable[[ClientMessage, int], None],
        eos_token_ids: list[int],
        clock: Callable[[], float] = time.monotonic,
        *,
        names_tenants: bool = True,
    ) -> None:
        """Send by `send(message, session)`, which drops messages of a session that is over.

        `names_tenants`: the engine lets this client name the tenants of its requests; else it is one for all.
        """
        self._send = send
        self._names_tenants = names_tenants
        self._clock = clock
        self._eos_token_ids = eos_token_ids
        self._ids = itertools.count()
        self._session: int | None = FIRST_SESSION  # None: there is no engine
        self._requests: dict[OpenRequest, Submission] = {}
        self._open: dict[str, OpenCompletion] = {}  # by wire id
        self._dead: EngineDeadError | None = None  # there will be no other session
        self._observers: tuple[Observer, ...] = ()

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[OpenRequest]:
        return iter(list(self._requests))

    def add_observer(self, observer: Observer) -> None:
        """Let `observer` observe every request submitted from now on."""
        self._observers = (*self._observers, observer)

    def submit(self, request: OpenRequest, most: int | None = None) -> None:
        """Send the engine requests of `request`, now or when there is an engine again.

        `most`: how many of them to send now; `send_more` sends the others.
        Raises `EngineDeadError`, or `ProtocolError` if it is too large.
        """
        if self._dead is not None:
            raise EngineDeadError(*self._dead.args)
        timeout = request.options.timeout
        submission = Submission(math.inf if timeout is None else self._clock() + timeout)
        for index in range(len(request.engine_params)):
            submission.completions[index] = OpenCompletion(request, index)
        self._requests[request] = submission
        try:
            if self._session is not None:
                self._start(request, submission, self._session, timeout, most)
        except BaseException:
            self._forget([request])
            raise
        for observer in self._observers:
            observer.on_submitted(request)

    def send_more(self, request: OpenRequest, most: int) -> bool:
        """Send up to `most` engine requests that `submit` has left; return False if there are none.

        Without an engine there are none either, since `resume` sends all. Raises `EngineDeadError`, or `ProtocolError`
        if one is too large.
        """
        submission = self._requests.get(request)
        if submission is None or submission.is_sent or self._session is None:
            return False
        self._start(request, submission, self._session, self._time_left(submission), most)
        return True

    def update(self, message: EngineCoreOutputs) -> list[OpenRequest]:
        """Distribute one frame of increments; return the requests that grew. Requests that ended leave the table."""
        now, num_tokens, num_together = self._clock(), 0, 0
        gaps: list[float] = []
        grown: dict[OpenRequest, None] = {}
        stopped: list[str] = []
        for received in message.outputs:
            entry = self._open.get(received.request_id)
            if entry is None:
                continue  # it was in flight when its request was aborted
            request = entry.request
            is_lost = received.finish_reason is FinishReason.ABORT and not self._requests[request].is_aborted
            output = _lost(received) if is_lost else received
            try:
                ended_here = request.append(entry.index, output, message.timestamp)
            except Exception as error:  # noqa: BLE001 - it concerns this request only, whose owner gets it
                request.error, ended_here = error, True
            if self._observers:
                num_tokens += self._note_growth(entry, output, now, gaps)
                num_together += max(0, len(output.new_token_ids) - 1)
            if ended_here:
                stopped.append(output.request_id)
            if ended_here or output.finish_reason is not None:
                del self._open[output.request_id]
                del self._requests[request].completions[entry.index]
            grown[request] = None
        self._end(stopped)
        if num_tokens:
            for observer in self._observers:
                observer.on_tokens(num_tokens, num_together, gaps, now)
        self._drop_finished(grown)
        return list(grown)

    def suspend(self, reason: str) -> list[OpenRequest]:
        """Take everything back from an engine that is gone for `reason`; to be repeated while there is none.

        Returns the requests that end now: those that were to be aborted, and those whose time is up.
        """
        ended: list[OpenRequest] = []
        if self._session is not None:
            self._session = None
            for completion in self._open.values():
                completion.wire_id = None
            self._open.clear()
            ended += [request for request, submission in self._requests.items() if submission.is_aborted]
            for request in ended:
                self._conclude(request, EngineCoreOutput("", finish_reason=FinishReason.ABORT))
            self._drop_finished(ended)
        late = self._expire(reason)
        self._drop_finished(late)
        return ended + late

    def resume(self, session: int) -> list[OpenRequest]:
        """Send all requests to the engine of a new session, with the tokens that they have; return those that fail."""
        self._session = session
        failed: list[OpenRequest] = []
        for request, submission in self._requests.items():
            try:
                self._start(request, submission, session, self._time_left(submission))
            except (EngineDeadError, ProtocolError) as error:
                request.error = error
                failed.append(request)
        self.drop(failed)
        return failed

    def abort(self, request: OpenRequest) -> bool:
        """Ask the engine to end `request`; its outputs still arrive, the last with finish reason "abort".

        Only such a request ends so: one that the engine ends by itself has lost its answer, and ends with an error.
        Return True if it has ended at once, since it is in no engine.
        """
        submission = self._requests.get(request)
        if submission is None:
            return False
        self._conclude(request, EngineCoreOutput("", finish_reason=FinishReason.ABORT))
        self._drop_finished([request])
        if wire_ids := submission.wire_ids:
            submission.is_aborted = True
            self._end(wire_ids)
        return request.finished

    def drop(self, requests: Iterable[OpenRequest]) -> None:
        """Remove these requests, and abort those that have not ended."""
        known = [request for request in requests if request in self._requests]
        self._forget(known)
        if known and self._observers:
            now = self._clock()
            for observer in self._observers:
                for request in known:
                    observer.on_finished(request, now)

    def fail(self, error: Exception) -> list[OpenRequest]:
        """End every open request with `error`; return these requests."""
        failed = list(self)
        for request in failed:
            request.error = error
        self.drop(failed)
        return failed

    def end(self, error: EngineDeadError) -> list[OpenRequest]:
        """End every open request with `error`, and all that may be submitted; return these requests."""
        self._dead = error
        return self.fail(error)

    def _expire(self, reason: str) -> list[OpenRequest]:
        """End the requests that are in no engine and whose time is up; return them."""
        now = self._clock()
        late = [
            request
            for request, submission in self._requests.items()
            if submission.deadline <= now and not submission.wire_ids
        ]
        for request in late:
            error = (
                f"the time of {request.options.timeout:g} s that the request was given was up while there was no "
                f"engine: {reason}, after {request.num_output_tokens} tokens"
            )
            self._conclude(request, EngineCoreOutput("", finish_reason=FinishReason.TIMEOUT, error=error))
        return late

    def _time_left(self, submission: Submission) -> float | None:
        left = submission.deadline - self._clock()
        return None if left == math.inf else max(_LEAST_TIMEOUT, left)

    def _start(
        self,
        request: OpenRequest,
        submission: Submission,
        session: int,
        timeout: float | None,
        most: int | None = None,
    ) -> None:
        """Send the open completions of a request that are in no engine, or as many."""
        completions = submission.completions.values()
        first = next((each.wire_id for each in completions if each.wire_id is not None), None)
        unsent = (each for each in completions if each.wire_id is None)
        for completion in list(itertools.islice(unsent, most)):
            wire_id = str(next(self._ids))
            params, generated = request.continuation(completion.index)
            message = EngineCoreRequest(
                wire_id,
                request.prompt.token_ids,
                params,
                self._eos_token_ids,
                request.metrics.arrival_time,
                request.options.priority,
                request.options.cache_salt,
                timeout,
                first,
                request.pooling,
                generated,
                request.options.tenant if self._names_tenants else "",
                identity=completion.identity,
                segment=request.prompt.segment,
                predicted_token_ids=request.prompt.predicted_token_ids,
            )
            self._send(message, session)
            completion.wire_id = wire_id
            self._open[wire_id] = completion
            first = first or wire_id

    def _conclude(self, request: OpenRequest, output: EngineCoreOutput) -> None:
        """End the completions that are in no engine with a terminal output of this side."""
        completions = self._requests[request].completions
        for index in [index for index, completion in completions.items() if completion.wire_id is None]:
            request.append(index, output, self._clock())
            del completions[index]

    def _drop_finished(self, requests: Iterable[OpenRequest]) -> None:
        if done := [request for request in requests if request.finished]:
            self.drop(done)

    def _forget(self, requests: list[OpenRequest]) -> None:
        wire_ids = [wire_id for request in requests for wire_id in self._requests[request].wire_ids]
        for request in requests:
            del self._requests[request]
        for wire_id in wire_ids:
            del self._open[wire_id]
        self._end(wire_ids)

    def _note_growth(self, entry: OpenCompletion, output: EngineCoreOutput, now: float, gaps: list[float]) -> int:
        """Return the number of new tokens; append the time since the previous increment to `gaps`."""
        num_tokens = len(output.new_token_ids) or sum(len(beam.token_ids) for beam in output.beams or ())
        if not num_tokens:
            return 0
        if entry.last_increment is not None:
            gaps.append(now - entry.last_increment)
        elif entry.request.first_chunk_time is None:
            entry.request.first_chunk_time = now
            for observer in self._observers:
                observer.on_first_tokens(entry.request, now)
        entry.last_increment = now
        return num_tokens

    def _end(self, wire_ids: list[str]) -> None:
        if self._session is None:
            return
        with suppress(EngineDeadError):  # in which case they have already ended
            for first in range(0, len(wire_ids), MAX_ABORTED):
                self._send(Abort(wire_ids[first : first + MAX_ABORTED]), self._session)


def _lost(output: EngineCoreOutput) -> EngineCoreOutput:
    """Return the last output of a request that the engine ended though nobody here asked for it: an error.

    An answer that was cut off must not look like one that is whole.
    """
    return msgspec.structs.replace(
        output,
        finish_reason=FinishReason.ERROR,
        error="the engine was stopped before this request had finished; send it again",
        error_kind=ErrorKind.SHUTTING_DOWN,
    )
