"""The intake of requests: a bounded queue, checks, and what lies between the socket's thread and the step loop."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable

from quire.engine_core.decoding import decoding_type
from quire.engine_core.decoding.parallel_samples import share_prompt
from quire.engine_core.grammar.constrained import ConstrainedRequests
from quire.engine_core.open_requests import OpenRequests
from quire.engine_core.outputs import Outputs
from quire.engine_core.request import Request
from quire.engine_core.scheduling.waiting import WaitingQueue
from quire.engine_core.validation import (
    RejectedError,
    ShuttingDownError,
    check_queue,
    check_shared_prompt,
)
from quire.protocol.engine_shape import EngineShape
from quire.protocol.messages import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    ErrorMessage,
    EventType,
    FinishReason,
)


class Intake:
    """Makes requests of messages, or rejects them with an error."""

    def __init__(
        self,
        waiting: WaitingQueue,
        requests: OpenRequests,
        constrained: ConstrainedRequests,
        outputs: Outputs,
        limits: EngineShape,
        *,
        seed: int,
        clock: Callable[[], float],
    ) -> None:
        """`seed` gives the seeds of requests that bring none."""
        self.draining = False  # open requests go on, new ones are rejected
        self._waiting = waiting
        self._requests = requests
        self._constrained = constrained
        self._outputs = outputs
        self._limits = limits
        self._clock = clock
        self._seeds = random.Random(seed)
        self._inbound = InboundRequests()

    def reject_early(self, client_id: bytes, message: EngineCoreRequest) -> EngineCoreOutputs | None:
        """Return the answer to a request for which there is no room; None lets it in, to be received.

        For the socket's thread, so that a rejection does not wait for the step to end.
        """
        request_id = message.request_id
        # Inbound requests first: one that has left them is open by then, or has been answered.
        in_use = self._inbound.holds(client_id, request_id) or self._requests.find(client_id, request_id) is not None
        if not in_use:  # else `receive` answers
            try:
                self._check_room(message, self._inbound.num_requests, self._inbound.num_tokens)
            except RejectedError as error:
                return EngineCoreOutputs([_rejection(message, error)], None, self._clock())
        self._inbound.let_in(client_id, message)
        return None

    def receive(self, client_id: bytes, message: EngineCoreRequest) -> None:
        """Queue a request, or answer it with an error."""
        self._inbound.receive(message)
        try:
            if self._requests.find(client_id, message.request_id) is None:
                self._add(client_id, message)
            else:
                text = f"request_id {message.request_id!r} is in use by a request that has not ended; choose another id"
                self._outputs.send(client_id, ErrorMessage(text))
        except RejectedError as error:
            self._outputs.add(client_id, _rejection(message, error))
        finally:
            self._inbound.forget(client_id, message)

    def _add(self, client_id: bytes, message: EngineCoreRequest) -> None:
        limits, other = self._limits, None
        self._check_room(message)
        kind = decoding_type(message)
        kind.check(message, limits)
        if message.shares_prompt_with is not None:
            other = self._requests.find(client_id, message.shares_prompt_with)
        if other is not None:
            check_shared_prompt(message, other)
        try:
            grammar = self._constrained.find(message.sampling_params)
        except ValueError as error:
            raise RejectedError(str(error)) from None
        now, decoding = self._clock(), kind(message, limits)
        request = Request.from_message(
            client_id, message, decoding, seed=self._seeds.getrandbits(63), now=now, limits=limits
        )
        try:
            self._constrained.begin(request, grammar)
        except ValueError as error:
            raise RejectedError(str(error)) from None
        request.record(EventType.QUEUED, now)
        if other is not None:
            share_prompt(request, other, limits)
        self._requests.add(request)

    def _check_room(self, message: EngineCoreRequest, num_requests: int = 0, num_tokens: int = 0) -> None:
        """Raise RejectedError if the queue is full, counting these inbound requests and prompt tokens."""
        if self.draining:
            raise ShuttingDownError("the engine is shutting down and takes no more requests; send it to another engine")
        num_requests, num_tokens = num_requests + len(self._waiting), num_tokens + self._waiting.num_tokens
        check_queue(message, num_requests, num_tokens, self._limits)


class InboundRequests:
    """Requests that the socket's thread has let in and the step loop has not received yet.

    Each thread writes its own half of the sums; the ids need a lock.
    """

    def __init__(self) -> None:
        self._let_in = self._let_in_tokens = self._received = self._received_tokens = 0
        self._lock = threading.Lock()
        self._ids: Counter[tuple[bytes, str]] = Counter()  # an id may come again before the first is received

    def let_in(self, client_id: bytes, message: EngineCoreRequest) -> None:
        """Count a request; on the socket's thread."""
        self._let_in += 1
        self._let_in_tokens += len(message.prompt_token_ids)
        with self._lock:
            self._ids[client_id, message.request_id] += 1

    def receive(self, message: EngineCoreRequest) -> None:
        """Stop counting a request; in the step loop, which counts it from here on."""
        self._received += 1
        self._received_tokens += len(message.prompt_token_ids)

    def forget(self, client_id: bytes, message: EngineCoreRequest) -> None:
        """Forget an id; in the step loop, once it has added or rejected the request. No effect without a socket."""
        key = client_id, message.request_id
        with self._lock:
            if self._ids[key] > 1:
                self._ids[key] -= 1
            else:
                del self._ids[key]

    def holds(self, client_id: bytes, request_id: str) -> bool:
        """Return True if a request with this id has been let in, and the step loop is not done with it."""
        return (client_id, request_id) in self._ids

    @property
    def num_requests(self) -> int:
        """Number of inbound requests; 0 without a socket."""
        return max(0, self._let_in - self._received)

    @property
    def num_tokens(self) -> int:
        """Tokens of their prompts."""
        return max(0, self._let_in_tokens - self._received_tokens)


def _rejection(message: EngineCoreRequest, error: RejectedError) -> EngineCoreOutput:
    return EngineCoreOutput(
        message.request_id, finish_reason=FinishReason.ERROR, error=str(error), error_kind=error.kind
    )
