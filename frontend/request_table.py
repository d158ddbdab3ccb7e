"""The open requests of one client, and the one place where they begin and end."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Protocol

from quire.frontend.errors import EngineDeadError
from quire.frontend.outputs import RequestMetrics
from quire.frontend.prompts import Prompt
from quire.frontend.request import Service
from quire.protocol.messages import (
    Abort,
    ClientMessage,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    PoolingParams,
    SamplingParams,
)


class OpenRequest(Protocol):
    """What a generation and an embedding have in common. `pooling` is an embedding's, which has one engine request."""

    request_id: str
    service: Service
    prompt: Prompt
    engine_params: Sequence[SamplingParams]
    pooling: PoolingParams | None
    metrics: RequestMetrics
    error: Exception | None

    @property
    def finished(self) -> bool:
        """Whether it has ended."""

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""

    def append(self, index: int, output: EngineCoreOutput, timestamp: float, /) -> bool:
        """Take an increment of engine request `index`. Returns whether the engine must be told that it has ended."""


class RequestTable:
    """Sends requests to the engine and hands each increment to the request it belongs to.

    The ids on the wire are counted, never a user's: an output that was under way when its request was aborted can
    then not be taken for one of a later request with the same name. Not thread-safe.
    """

    def __init__(self, send: Callable[[ClientMessage], None], eos_token_ids: list[int]) -> None:
        self._send = send
        self._eos_token_ids = eos_token_ids
        self._ids = itertools.count()
        self._open: dict[str, tuple[OpenRequest, int]] = {}  # id on the wire -> the request, and which completion
        self._wire_ids: dict[OpenRequest, list[str]] = {}

    def __len__(self) -> int:
        return len(self._wire_ids)

    def __iter__(self) -> Iterator[OpenRequest]:
        return iter(list(self._wire_ids))

    def submit(self, request: OpenRequest) -> None:
        """Send the engine requests of `request`. Raises `EngineDeadError`, or `ProtocolError` when it is too large."""
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
                    request.service.priority,
                    request.service.cache_salt,
                    request.service.timeout,
                    wire_ids[0] if wire_ids else None,
                    request.pooling,
                )
                self._send(message)
                wire_ids.append(wire_id)
                self._open[wire_id] = (request, index)
        except BaseException:
            self.drop([request])
            raise

    def update(self, message: EngineCoreOutputs) -> list[OpenRequest]:
        """Hand out one frame of increments; returns the requests that grew. What has ended leaves the table."""
        grown: dict[OpenRequest, None] = {}
        stopped: list[str] = []
        for output in message.outputs:
            entry = self._open.get(output.request_id)
            if entry is None:
                continue  # under way when its request was aborted
            request, index = entry
            try:
                ended_here = request.append(index, output, message.timestamp)
            except Exception as error:  # noqa: BLE001 - it concerns this request only; its owner gets to see it
                request.error, ended_here = error, True
            if ended_here:
                stopped.append(output.request_id)
                del self._open[output.request_id]
            elif output.finish_reason is not None:
                del self._open[output.request_id]
            grown[request] = None
        self._end(stopped)
        done = [request for request in grown if request.finished]
        if done:
            self.drop(done)
        return list(grown)

    def abort(self, request: OpenRequest) -> None:
        """Ask the engine to end `request`; its outputs still come, the last with finish reason "abort"."""
        self._end(self._running([request]))

    def drop(self, requests: Iterable[OpenRequest]) -> None:
        """Forget these requests, and let the engine end what still runs of them."""
        requests = list(requests)
        wire_ids = self._running(requests)
        for request in requests:
            self._wire_ids.pop(request, None)
        for wire_id in wire_ids:
            del self._open[wire_id]
        self._end(wire_ids)

    def fail(self, error: Exception) -> list[OpenRequest]:
        """End every open request with `error`; returns them."""
        failed = list(self)
        for request in failed:
            request.error = error
        self.drop(failed)
        return failed

    def _end(self, wire_ids: list[str]) -> None:
        if wire_ids:
            with suppress(EngineDeadError):  # then they have ended already
                self._send(Abort(wire_ids))

    def _running(self, requests: Iterable[OpenRequest]) -> list[str]:
        return [wire_id for request in requests for wire_id in self._wire_ids.get(request, ()) if wire_id in self._open]
