"""The ingress's connection to the replicas: to its client one engine, which never dies.

Each request is a call of a replica, which Ray Serve's router chooses, and whose items are the request's outputs. If a
call is lost, since the engine, its replica or the node has died, the request is sent again with the tokens that have
come, and goes on elsewhere as it would have there.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import math
import queue
import secrets
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextvars import Context
from typing import Any, Protocol

import msgspec

from quire.frontend.client.merged_stats import merged
from quire.frontend.ray.replica import CLOCK, HEARTBEAT_SECONDS
from quire.protocol.codec import ClientDecoder, EngineDecoder, Frame, encode
from quire.protocol.messages import (
    Abort,
    ClientMessage,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineMessage,
    ErrorKind,
    FinishReason,
    Goodbye,
    Hello,
    Ping,
    Pong,
    Ready,
    UtilityCall,
    UtilityResult,
)

logger = logging.getLogger(__name__)

_SILENT_SECONDS = 6 * HEARTBEAT_SECONDS  # after which a call is lost
_UNTAKEN_SECONDS = 60.0  # after which a call is made again that no replica has taken, maybe since its own is frozen
_MOST_LOSSES = 10  # of a request in a row, without a token in between
_LONGEST_PAUSE = 2.0  # seconds, between two calls for the same request
_LATE_SECONDS = 1.0  # after the end of its time, at which a request ends that no engine has
_MOST_AT_ONCE = 8  # messages: each takes the GIL, for which a busy thread makes the client's one wait


class ReplicaCall(Protocol):
    """A call of a replica's `relay`."""

    def __aiter__(self) -> AsyncIterator[bytes]: ...

    def cancel(self) -> None:
        """End the call."""


class Replicas(Protocol):
    """All replicas of the engine."""

    def relay(self, frame: bytes, text_files: str) -> ReplicaCall:
        """Call `EngineReplica.relay` of one of them."""

    async def describe(self) -> bytes:
        """Call `EngineReplica.describe` of one of them."""

    async def call_all(self, frame: bytes) -> Sequence[bytes | Exception]:
        """Call `EngineReplica.call` of each."""


class ReplicaConnection:
    """Stand-in for the `Connection` of a `CoreClient`: it answers as an engine would, with what the replicas say.

    Calls run on `loop`; `post` and `wake` may be called from any thread, `exchange` from one at a time.
    """

    def __init__(self, replicas: Replicas, loop: asyncio.AbstractEventLoop) -> None:
        self._replicas = replicas
        self._loop = loop
        self._name = secrets.token_hex(8)  # that begins the ids of this connection's requests
        self._text_files = ""  # of the engines, as the one had them that answered the Hello
        self._requests = EngineDecoder()
        self._inbox: queue.SimpleQueue[EngineMessage | None] = queue.SimpleQueue()
        self._open: dict[str, asyncio.Task[None]] = {}  # requests, by their ids
        self._calls: set[asyncio.Task[None]] = set()  # all others

    def post(self, frames: Sequence[Frame]) -> None:
        """Send the frames of a message. Any thread."""
        # A context of its own: calls in that of an HTTP request would share its id, by which Ray's router knows them.
        self._loop.call_soon_threadsafe(self._take, self._requests.decode(frames), context=Context())

    def wake(self) -> None:
        """Make a running `exchange` return. Any thread."""
        self._inbox.put(None)

    def exchange(self, timeout: float) -> list[EngineMessage]:
        """Return the messages that arrive, after at most `timeout` seconds."""
        messages: list[EngineMessage | None] = []
        try:
            messages.append(self._inbox.get(timeout=max(0.0, timeout)))
            while len(messages) < _MOST_AT_ONCE:
                messages.append(self._inbox.get_nowait())
        except queue.Empty:
            pass
        return [message for message in messages if message is not None]

    def close(self) -> None:
        """End all calls."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._cancel_all)

    # What follows runs on the loop.

    def _take(self, message: ClientMessage) -> None:
        match message:
            case EngineCoreRequest():
                task = self._loop.create_task(self._serve(message))
                self._open[message.request_id] = task
                task.add_done_callback(lambda _task: self._open.pop(message.request_id, None))
            case Abort():
                self._abort(message.request_ids)
            case Ping():
                self._inbox.put(Pong())
            case Hello():
                self._start(self._describe())
            case UtilityCall():
                self._start(self._answer(message))
            case Goodbye():
                self._cancel_all()

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)

    def _cancel_all(self) -> None:
        for task in (*self._open.values(), *self._calls):
            task.cancel()

    def _abort(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            if (task := self._open.pop(request_id, None)) is not None:
                task.cancel()
                self._put(EngineCoreOutput(request_id, finish_reason=FinishReason.ABORT))

    def _put(self, *outputs: EngineCoreOutput, timestamp: float | None = None) -> None:
        self._inbox.put(EngineCoreOutputs(list(outputs), None, timestamp or time.monotonic()))

    async def _describe(self) -> None:
        ready = ClientDecoder().decode([await self._replicas.describe()])
        assert isinstance(ready, Ready)
        self._text_files = ready.text_files
        self._inbox.put(ready)

    async def _answer(self, call: UtilityCall) -> None:
        try:
            combine = _combiner_of(call.method)
            answers = await self._replicas.call_all(bytes(encode(call)[0]))
            self._inbox.put(UtilityResult(call.call_id, combine(_results(call.method, answers))))
        except Exception as error:  # noqa: BLE001 - whatever it is, its caller gets it
            self._inbox.put(UtilityResult(call.call_id, error=f"{error}"))

    async def _serve(self, request: EngineCoreRequest) -> None:
        """Serve a request by as many calls as it takes."""
        relayed = RelayedRequest(request, self._name)
        late = None if request.timeout is None else request.timeout + _LATE_SECONDS
        try:
            async with asyncio.timeout(late):
                while not relayed.has_ended:
                    cause = await self._attempt(relayed)
                    if cause is not None and not relayed.has_ended:
                        await relayed.lose(cause)
        except TimeoutError:
            error = f"the time of {request.timeout:g} s that the request was given was up while no engine had it"
            self._put(EngineCoreOutput(request.request_id, finish_reason=FinishReason.TIMEOUT, error=error))
        except LostRequestError as error:
            kind = ErrorKind.FAILED
            self._put(
                EngineCoreOutput(
                    request.request_id, finish_reason=FinishReason.ERROR, error=str(error), error_kind=kind
                )
            )

    async def _attempt(self, relayed: RelayedRequest) -> str | None:
        """Pass on the outputs of one call; return why it was lost, unless the request has ended.

        Return None if no replica took it in time: the request is not to blame for that.
        """
        call = self._replicas.relay(relayed.frame(), self._text_files)
        try:
            async with asyncio.timeout(_UNTAKEN_SECONDS) as silence:
                async for item in call:
                    silence.reschedule(self._loop.time() + _SILENT_SECONDS)
                    if (outputs := relayed.take(item)) is not None:
                        self._inbox.put(outputs)
        except Exception as error:  # noqa: BLE001 - Ray's errors are of many kinds; all mean that the call is lost
            if silence.expired() and not relayed.is_taken:
                logger.warning("no replica took a request within %g s; it is sent again", _UNTAKEN_SECONDS)
                return None
            return f"{type(error).__name__}: {error}"
        finally:
            if not relayed.has_ended:
                call.cancel()
        return "its engine died"


class LostRequestError(Exception):
    """A request that was lost again and again, as if it were the cause."""


class RelayedRequest:
    """A request that replicas serve, one after the other if need be, and the tokens that have come."""

    def __init__(self, request: EngineCoreRequest, connection: str) -> None:
        self.has_ended = False
        self._request = request
        self._connection = connection
        self._deadline = math.inf if request.timeout is None else time.monotonic() + request.timeout
        self._tokens = list(request.generated_token_ids)
        self._decoder = ClientDecoder()
        self._calls = itertools.count()
        self._num_losses = 0  # since the last token
        self._offset: float | None = None  # of the clock here to that of the present replica

    @property
    def is_taken(self) -> bool:
        """True if a replica has the present call."""
        return self._offset is not None

    def frame(self) -> bytes:
        """Return the request as it is to be sent now, encoded, under an id of its own."""
        self._offset = None
        request, call = self._request, next(self._calls)
        params = request.sampling_params
        if call and self._tokens and params.prompt_logprobs is not None:  # they have come
            params = msgspec.structs.replace(params, prompt_logprobs=None)
        shared = request.shares_prompt_with if call == 0 else None
        sent = msgspec.structs.replace(
            request,
            request_id=self._id(request.request_id, call),
            sampling_params=params,
            generated_token_ids=self._tokens,
            timeout=None if request.timeout is None else max(1e-3, self._deadline - time.monotonic()),
            shares_prompt_with=None if shared is None else self._id(shared, 0),
        )
        return bytes(encode(sent)[0])

    def take(self, item: bytes) -> EngineCoreOutputs | None:
        """Return the outputs in an item of a call, with this request's id and the clock here; None if it has none."""
        if self._offset is None:
            self._offset = time.monotonic() - CLOCK.unpack(item)[0]
            return None
        if not item:
            return None
        outputs = self._decoder.decode([item])
        assert isinstance(outputs, EngineCoreOutputs)
        outputs.timestamp += self._offset
        for output in outputs.outputs:
            self._note(output, self._offset)
        return outputs

    async def lose(self, cause: str) -> None:
        """Wait until the request is to be sent again. Raises `LostRequestError` if that is of no use."""
        logger.warning("request %s was lost, and is sent again if it may be: %s", self._request.request_id, cause)
        self._num_losses += 1
        if self._num_losses >= _MOST_LOSSES:
            raise LostRequestError(
                f"the request was lost {self._num_losses} times in a row, with the engines that had it; the server's "
                "log has the reasons"
            )
        if self._num_losses > 1:
            await asyncio.sleep(min(_LONGEST_PAUSE, 0.05 * 2**self._num_losses))

    def _id(self, request_id: str, call: int) -> str:
        return f"{self._connection}-{request_id}-{call}"

    def _note(self, output: EngineCoreOutput, offset: float) -> None:
        if output.finish_reason is FinishReason.ABORT or output.error_kind is ErrorKind.SHUTTING_DOWN:
            output.finish_reason = output.error = output.error_kind = None  # the engine ends: the call is lost
        output.request_id = self._request.request_id
        for event in output.events:
            event.timestamp += offset
        self._tokens += output.new_token_ids
        self.has_ended = output.finish_reason is not None
        if output.new_token_ids:
            self._num_losses = 0


def _combiner_of(method: str) -> Callable[[Sequence[Any]], Any]:
    """Return how the replicas' results of a utility call become one. Raises `RuntimeError` if they don't."""
    if (combine := _COMBINED.get(method)) is not None:
        return combine
    raise RuntimeError(
        f"{method} is not available under Ray Serve, where engines come and go; to change options of the engines, "
        "deploy the application with others"
    )


def _results(method: str, answers: Sequence[bytes | Exception]) -> list[Any]:
    """Return the results of the replicas that have answered. Raises `RuntimeError` if too few have."""
    failures = [answer for answer in answers if isinstance(answer, Exception)]
    results = [msgspec.msgpack.decode(answer) for answer in answers if isinstance(answer, bytes)]
    if not results:
        raise RuntimeError("no replica of the engine has answered; there may be none now")
    if failures and method in _OF_ALL:
        raise RuntimeError(
            f"{method} has failed at {len(failures)} of {len(answers)} replicas: {failures[0]}; try again"
        )
    return results


def _all(results: Sequence[Any]) -> bool:
    return all(results)


def _only(method: str, results: Sequence[Any]) -> Any:
    if len(results) != 1:
        raise RuntimeError(f"{method} shows one engine, and there are {len(results)} replicas now")
    return results[0]


_OF_ALL = frozenset({"reset_cache"})  # succeed only if each replica has done them
_COMBINED: dict[str, Callable[[Sequence[Any]], Any]] = {
    "stats": merged,
    "reset_cache": _all,
    "snapshot": functools.partial(_only, "snapshot"),
    "prefix_tree": functools.partial(_only, "prefix_tree"),
}
