"""The table of a client's open requests, the one place where they start and end."""

from __future__ import annotations

import itertools
import math
import secrets
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from quire.frontend.client.observer import Observer, OpenRequest
from quire.frontend.client.routing import FIRST_SESSION, Routing, Session, route_of
from quire.frontend.errors import EngineDeadError
from quire.frontend.outputs import RouteHop
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
from quire.protocol.routing.routers import RoutedRequest

_LEAST_TIMEOUT = 1e-3  # seconds, of a request whose time is up while it is sent again
_IDENTITY_BITS = 63
_MOST_FRUITLESS = 2  # engines that a request may lose in a row without a token, before it is bound to the last of them
_MOST_BOUND_SECONDS = 60.0
_PART_COMPLETIONS, _PART_TOKENS = 8, 16384


@dataclass(slots=True, eq=False)
class OpenCompletion:
    """A completion that has not ended. `last_increment` is when it last grew, None without observers."""

    submission: Submission
    index: int
    wire_id: str | None = None  # id in the present session; None: it is still to be sent
    last_increment: float | None = None
    identity: int = field(default_factory=lambda: secrets.randbits(_IDENTITY_BITS))  # id for all sessions


@dataclass(slots=True, eq=False)
class Submission:
    """An open request, with its open completions by index, and the engine that it is in."""

    request: OpenRequest
    deadline: float
    route: RoutedRequest
    session: Session | None = None  # None: it is in no engine
    is_aborted: bool = False  # the engine has been told to abort it, and may not have answered
    has_grown: bool = False  # in its present session
    num_fruitless: int = 0  # engines that were lost under it in a row, and none of which has given it a token
    home: int | None = None  # the one engine that it may go to, None for any,
    bound_until: float = 0.0  # at most until that time
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
    """The table that sends requests to engines and passes each increment to its request.

    A request outlives the engine that works on it: when the engine is gone, `suspend` takes back what it had, which
    goes on in another one, or else in the next one that there is, with the tokens that have been received. `resend`
    sends it there, a part at each call: many long prompts take longer than others on an event loop may wait.

    An engine may have died of one of its requests. So that this one doesn't kill all engines in turn, a request under
    which two have been lost in a row waits for the second to come back, which knows what it has died of.

    Wire ids are counters, never the user's ids: an output that was in flight when its request was aborted can
    then not be mistaken for one of a later request with the same id. Not thread-safe.
    """

    def __init__(
        self,
        send: Callable[[ClientMessage, Session], None],
        eos_token_ids: list[int],
        clock: Callable[[], float] = time.monotonic,
        *,
        routing: Routing | None = None,
        names_tenants: bool = True,
    ) -> None:
        """Send by `send(message, session)`, which drops messages of a session that is over.

        `routing` has the sessions that are open; without it there is one. `names_tenants`: engines let this client name
        the tenants of its requests; else it is one for all.
        """
        self._send = send
        self._routing = routing or _one_engine()
        self._names_tenants = names_tenants
        self._clock = clock
        self._eos_token_ids = eos_token_ids
        self._ids = itertools.count()
        self._requests: dict[OpenRequest, Submission] = {}
        self._open: dict[str, OpenCompletion] = {}  # by wire id
        self._unsent: dict[Submission, None] = {}  # of which `resend` has something to send, once there is an engine
        self._resending: deque[Submission] = deque()  # those for which there may be one
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
        deadline = math.inf if timeout is None else self._clock() + timeout
        submission = Submission(request, deadline, route_of(request))
        for index in range(len(request.engine_params)):
            submission.completions[index] = OpenCompletion(submission, index)
        self._requests[request] = submission
        try:
            self._start(submission, timeout, most)
        except BaseException:
            self._forget([request])
            raise
        for observer in self._observers:
            observer.on_submitted(request)

    def send_more(self, request: OpenRequest, most: int) -> bool:
        """Send up to `most` engine requests that `submit` has left; return False if there are none.

        There are none either once `resend` is to send them. Raises `EngineDeadError`, or `ProtocolError` if one is too
        large.
        """
        submission = self._requests.get(request)
        if submission is None or submission in self._unsent or submission.is_sent:
            return False
        self._start(submission, self._time_left(submission), most)
        return True

    @property
    def is_resending(self) -> bool:
        """Whether there is something to send again, and may be an engine for it."""
        return bool(self._resending)

    def resend(self) -> list[OpenRequest]:
        """Send a part of what engines have lost, in a few milliseconds; return the requests that fail."""
        if not self._resending:
            return []
        submission = self._resending[0]
        if submission not in self._unsent:  # it has ended, or has been sent in an earlier turn
            self._resending.popleft()
            return []
        try:
            self._start(submission, self._time_left(submission), part_of(submission.request))
        except (EngineDeadError, ProtocolError) as error:
            submission.request.error = error
            self.drop([submission.request])
            return [submission.request]
        if submission.session is None:
            self._resending.popleft()
        elif submission.is_sent:
            del self._unsent[self._resending.popleft()]
        return []

    def _resend_all(self) -> None:
        """Have `resend` try everything that is to be sent again."""
        self._resending = deque(self._unsent)

    def update(self, message: EngineCoreOutputs) -> list[OpenRequest]:
        """Distribute one frame of increments; return the requests that grew. Requests that ended leave the table."""
        now, num_tokens, num_together = self._clock(), 0, 0
        gaps: list[float] = []
        grown: dict[OpenRequest, None] = {}
        stopped: list[OpenCompletion] = []
        for received in message.outputs:
            entry = self._open.get(received.request_id)
            if entry is None:
                continue  # it was in flight when its request was aborted
            submission = entry.submission
            request = submission.request
            output = received
            if received.finish_reason is not None:
                if (last := self._unless_moved(submission, received)) is None:
                    continue
                output = last
            try:
                ended_here = request.append(entry.index, output, message.timestamp)
            except Exception as error:  # noqa: BLE001 - it concerns this request only, whose owner gets it
                request.error, ended_here = error, True
            if self._observers:
                num_tokens += self._note_growth(entry, output, now, gaps)
                num_together += max(0, len(output.new_token_ids) - 1)
            if output.new_token_ids and not submission.has_grown:
                submission.has_grown, submission.num_fruitless, submission.home = True, 0, None
                self._routing.router.first_token(submission.route)
            if ended_here:
                stopped.append(entry)
            if ended_here or output.finish_reason is not None:
                del self._open[output.request_id]
                del submission.completions[entry.index]
            grown[request] = None
        self._end(stopped)
        if num_tokens:
            for observer in self._observers:
                observer.on_tokens(num_tokens, num_together, gaps, now)
        self._drop_finished(grown)
        return list(grown)

    def suspend(self, reason: str, engine: int = 0, *, is_loss: bool = True) -> list[OpenRequest]:
        """Take back what an engine had that is gone for `reason`, to be sent again; to be repeated while there is none.

        `is_loss`: it has not given way in order. Returns the requests that end now: those that were to be aborted, and
        those whose time is up.
        """
        ended: list[OpenRequest] = []
        if self._routing.session_of(engine) is not None:
            taken = self._take_all_back(engine, "lost" if is_loss else "moved")
            for submission in taken if is_loss else ():
                self._note_loss(submission, engine)
            ended += [submission.request for submission in taken if submission.is_aborted]
            for request in ended:
                self._conclude(request, EngineCoreOutput("", finish_reason=FinishReason.ABORT))
            self._drop_finished(ended)
            self._resend_all()
        else:
            self._release_patient(engine)
        late = self._expire(reason)
        self._drop_finished(late)
        return ended + late

    def _note_loss(self, submission: Submission, engine: int) -> None:
        """Count the loss of an engine under a request, and bind the request to it if there are too many."""
        submission.num_fruitless += 1
        if submission.num_fruitless >= _MOST_FRUITLESS:
            submission.home, submission.bound_until = engine, self._clock() + _MOST_BOUND_SECONDS

    def _release_patient(self, engine: int) -> None:
        """Let requests go elsewhere that have waited too long for an engine."""
        now = self._clock()
        patient = [each for each in self._requests.values() if each.home == engine and each.bound_until <= now]
        for submission in patient:
            submission.home = None
        if patient:
            self._resend_all()

    def resume(self, session: Session, block_size: int = 1, address: str = "") -> None:
        """Let the requests that are in no engine be sent to that of a new session, or to another.

        They have the tokens that they have received. `block_size` and `address` are those of the engine, see `Routing`.
        """
        if self._routing.session_of(session.engine) not in (None, session):  # the news of its end has not come
            self._take_all_back(session.engine, "lost")
        self._routing.open(session, block_size, address)
        self._resend_all()

    def leave(self, reason: str, engine: int) -> list[OpenRequest]:
        """Take back what an engine has that is there, but will not be used any more; return the requests that end."""
        ended = self.suspend(reason, engine, is_loss=False)
        for submission in self._requests.values():
            if submission.home == engine:
                submission.home = None
        self._resend_all()
        return ended

    def _unless_moved(self, submission: Submission, output: EngineCoreOutput) -> EngineCoreOutput | None:
        """Return what has arrived as the request is to take it; None if the request goes on in another engine."""
        if submission.is_aborted or not _is_given_up(output):
            return output
        if self._move(submission):
            return None
        return _lost(output) if output.finish_reason is FinishReason.ABORT else output

    def _move(self, submission: Submission) -> bool:
        """Have a request sent to another engine, since the one that it is in ends; return False if there is none."""
        session = submission.session
        if session is None or not self._routing.has_other(session.engine):
            return False
        self._routing.note_end(session.engine)
        self._end(submission.completions.values())
        self._take_back(submission, "moved")
        submission.home = None
        self._resending.append(submission)
        return True

    def count(self, engine: int) -> int:
        """Return the number of requests that an engine has."""
        return self.counts()[engine]

    def counts(self) -> Counter[int]:
        """Return the number of requests that each engine has."""
        return Counter(each.session.engine for each in self._requests.values() if each.session is not None)

    def _submissions_in(self, engine: int) -> list[Submission]:
        return [each for each in self._requests.values() if each.session is not None and each.session.engine == engine]

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
        if submission.wire_ids:
            submission.is_aborted = True
            self._end(submission.completions.values())
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

    def fail(self, error: Exception, engine: int | None = None) -> list[OpenRequest]:
        """End every open request with `error`, or those in one engine; return these requests."""
        failed = list(self) if engine is None else [each.request for each in self._submissions_in(engine)]
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

    def _start(self, submission: Submission, timeout: float | None, most: int | None = None) -> None:
        """Send the open completions of a request that are in no engine, or as many, if there is an engine for it."""
        if submission.session is None:
            submission.session = self._routing.send(submission.route, submission.home)
            if submission.session is None:
                self._unsent[submission] = None
                return
            hop = RouteHop(submission.session.engine, submission.route.reason)
            submission.request.metrics.route.append(hop)
        request, completions = submission.request, submission.completions.values()
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
                kv_source=self._routing.source_of(submission.route),
                adapter=request.options.adapter,
            )
            self._send(message, submission.session)
            completion.wire_id = wire_id
            self._open[wire_id] = completion
            first = first or wire_id

    def _take_all_back(self, engine: int, left: Literal["lost", "moved"]) -> list[Submission]:
        """End the session with an engine; take back and return what it had.

        All is aborted, too: the engine may go on, and others may compute prompts for it.
        """
        taken = self._submissions_in(engine)
        self._routing.close(engine)
        self._end(completion for submission in taken for completion in submission.completions.values())
        for submission in taken:
            self._take_back(submission, left)
        return taken

    def _take_back(self, submission: Submission, left: Literal["lost", "moved"]) -> None:
        """Note that a request is in no engine any more, and why."""
        submission.request.metrics.route[-1].left = left
        for completion in submission.completions.values():
            if completion.wire_id is not None:
                del self._open[completion.wire_id]
                completion.wire_id = None
        submission.session, submission.has_grown = None, False
        self._unsent[submission] = None
        self._routing.router.take_back(submission.route)

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
        ended = [self._requests.pop(request) for request in requests]
        open_completions = [completion for each in ended for completion in each.completions.values()]
        for submission in ended:
            self._unsent.pop(submission, None)
            self._routing.router.ended(submission.route, submission.request.num_output_tokens)
        self._end(open_completions)
        for completion in open_completions:
            if completion.wire_id is not None:
                del self._open[completion.wire_id]

    def _note_growth(self, entry: OpenCompletion, output: EngineCoreOutput, now: float, gaps: list[float]) -> int:
        """Return the number of new tokens; append the time since the previous increment to `gaps`."""
        num_tokens = len(output.new_token_ids) or sum(len(beam.token_ids) for beam in output.beams or ())
        if not num_tokens:
            return 0
        if entry.last_increment is not None:
            gaps.append(now - entry.last_increment)
        elif (request := entry.submission.request).first_chunk_time is None:
            request.first_chunk_time = now
            for observer in self._observers:
                observer.on_first_tokens(request, now)
        entry.last_increment = now
        return num_tokens

    def _end(self, completions: Iterable[OpenCompletion]) -> None:
        """Have engines abort those of the completions that they have."""
        wire_ids: dict[Session, list[str]] = {}
        for completion in completions:
            session = completion.submission.session
            if completion.wire_id is not None and session is not None:
                wire_ids.setdefault(session, []).append(completion.wire_id)
        for session, each in wire_ids.items():
            with suppress(EngineDeadError):  # in which case they have already ended
                for first in range(0, len(each), MAX_ABORTED):
                    self._send(Abort(each[first : first + MAX_ABORTED]), session)


def _one_engine() -> Routing:
    """Return the sessions of a client of one engine."""
    routing = Routing()
    routing.open(FIRST_SESSION)
    return routing


def part_of(request: OpenRequest) -> int:
    """Return how many completions of a request can be sent in a fraction of a millisecond; each has the prompt."""
    num_tokens = len(request.prompt.token_ids) + request.num_output_tokens
    return max(1, min(_PART_COMPLETIONS, _PART_TOKENS // (1 + num_tokens)))


def _is_given_up(output: EngineCoreOutput) -> bool:
    """Return True for the last output of a request that its engine ends since it ends itself, or is asked to."""
    if output.finish_reason is FinishReason.ERROR:
        return output.error_kind is ErrorKind.SHUTTING_DOWN
    return output.finish_reason is FinishReason.ABORT


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
