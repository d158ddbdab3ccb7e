"""The table of a client's open requests, the one place where they start and end."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass

from quire.frontend.client.observer import Observer, OpenRequest
from quire.frontend.errors import EngineDeadError
from quire.protocol.messages import Abort, ClientMessage, EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest


@dataclass(slots=True)
class OpenCompletion:
    """A completion that the engine works on; `last_increment` is when it last grew, None without observers."""

    request: OpenRequest
    index: int
    last_increment: float | None = None


class RequestTable:
    """The table that sends requests to the engine and passes each increment to its request.

    Wire ids are counters, never the user's ids: an output that was in flight when its request was aborted can
    then not be mistaken for one of a later request with the same id. Not thread-safe.
    """

    def __init__(
        self,
        send: Callable[[ClientMessage], None],
        eos_token_ids: list[int],
        clock: Callable[[], float] = time.monotonic,
        *,
        names_tenants: bool = True,
    ) -> None:
        """`names_tenants`: the engine lets this client name the tenants of its requests; else it is one for all."""
        self._send = send
        self._names_tenants = names_tenants
        self._clock = clock
        self._eos_token_ids = eos_token_ids
        self._ids = itertools.count()
        self._open: dict[str, OpenCompletion] = {}  # by wire id
        self._wire_ids: dict[OpenRequest, list[str]] = {}
        self._observers: tuple[Observer, ...] = ()

    def __len__(self) -> int:
        return len(self._wire_ids)

    def __iter__(self) -> Iterator[OpenRequest]:
        return iter(list(self._wire_ids))

    def add_observer(self, observer: Observer) -> None:
        """Let `observer` observe every request submitted from now on."""
        self._observers = (*self._observers, observer)

    def submit(self, request: OpenRequest) -> None:
        """Send the engine requests of `request`. Raises `EngineDeadError`, or `ProtocolError` if it is too large."""
        wire_ids = self._wire_ids[request] = []
        try:
            for index, params in enumerate(request.engine_params):
                wire_id = str(next(self._ids))
                message = EngineCoreRequest(
                    wire_id,
                    request.prompt.token_ids,
                    params,
                    self._eos_token_ids,
                    request.metrics.arrival_time,
                    request.options.priority,
                    request.options.cache_salt,
                    request.options.timeout,
                    wire_ids[0] if wire_ids else None,
                    request.pooling,
                    request.options.tenant if self._names_tenants else "",
                )
                self._send(message)
                wire_ids.append(wire_id)
                self._open[wire_id] = OpenCompletion(request, index)
        except BaseException:
            self._forget([request])
            raise
        for observer in self._observers:
            observer.on_submitted(request)

    def update(self, message: EngineCoreOutputs) -> list[OpenRequest]:
        """Distribute one frame of increments; return the requests that grew. Requests that ended leave the table."""
        now, num_tokens = self._clock(), 0
        gaps: list[float] = []
        grown: dict[OpenRequest, None] = {}
        stopped: list[str] = []
        for output in message.outputs:
            entry = self._open.get(output.request_id)
            if entry is None:
                continue  # it was in flight when its request was aborted
            request = entry.request
            try:
                ended_here = request.append(entry.index, output, message.timestamp)
            except Exception as error:  # noqa: BLE001 - it concerns this request only, whose owner gets it
                request.error, ended_here = error, True
            if self._observers:
                num_tokens += self._note_growth(entry, output, now, gaps)
            if ended_here:
                stopped.append(output.request_id)
                del self._open[output.request_id]
            elif output.finish_reason is not None:
                del self._open[output.request_id]
            grown[request] = None
        self._end(stopped)
        if num_tokens:
            for observer in self._observers:
                observer.on_tokens(num_tokens, gaps, now)
        done = [request for request in grown if request.finished]
        if done:
            self.drop(done)
        return list(grown)

    def abort(self, request: OpenRequest) -> None:
        """Ask the engine to end `request`; its outputs still arrive, the last with finish reason "abort"."""
        self._end(self._running([request]))

    def drop(self, requests: Iterable[OpenRequest]) -> None:
        """Remove these requests, and abort those that have not ended."""
        known = [request for request in requests if request in self._wire_ids]
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

    def _forget(self, requests: list[OpenRequest]) -> None:
        wire_ids = self._running(requests)
        for request in requests:
            del self._wire_ids[request]
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
        if wire_ids:
            with suppress(EngineDeadError):  # in which case they have already ended
                self._send(Abort(wire_ids))

    def _running(self, requests: Iterable[OpenRequest]) -> list[str]:
        return [wire_id for request in requests for wire_id in self._wire_ids.get(request, ()) if wire_id in self._open]
