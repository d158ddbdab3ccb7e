"""The intake of requests: checks, and the place of each in the queue."""

from __future__ import annotations

import random
from collections.abc import Sequence

from quire.engine_core.decoding import decoding_type
from quire.engine_core.decoding.parallel_samples import share_prompt
from quire.engine_core.feature import Feature, held_status, hooks
from quire.engine_core.grammar.constrained import ConstrainedRequests
from quire.engine_core.open_requests import OpenRequests
from quire.engine_core.outputs import Outputs
from quire.engine_core.queue_bounds import NO_REQUESTS, InboundRequests, QueueBounds
from quire.engine_core.request import Request, RequestStatus
from quire.engine_core.validation import (
    RejectedError,
    ShuttingDownError,
    check_no_adapter,
    check_shared_prompt,
)
from quire.kernels.runner import Sequences
from quire.protocol.engine_shape import EngineShape
from quire.protocol.messages import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineMessage,
    ErrorMessage,
    EventType,
    FinishReason,
)


class Intake:
    """Makes requests of messages, or rejects them with an error."""

    def __init__(
        self,
        requests: OpenRequests,
        constrained: ConstrainedRequests,
        outputs: Outputs,
        bounds: QueueBounds,
        limits: EngineShape,
        sequences: Sequences,
        features: Sequence[Feature] = (),
        *,
        seed: int,
    ) -> None:
        """`seed` gives the seeds of requests that bring none."""
        self.draining = False  # open requests go on, new ones are rejected
        self._bounds = bounds
        self._checks = hooks(features, Feature.check)
        self._takes_adapters = any(feature.takes_adapters for feature in features)
        self._begin, self._held_status = hooks(features, Feature.begin), hooks(features, Feature.held_status)
        self._requests = requests
        self._constrained = constrained
        self._outputs = outputs
        self._limits = limits
        self._sequences = sequences
        self._clock = outputs.clock
        self._seeds = random.Random(seed)
        self._inbound = InboundRequests()

    def is_open(self, client_id: bytes, request_id: str) -> bool:
        """Return True if a client's request with this id has been accepted, and has not ended. Any thread."""
        # Inbound requests first: one that has left them is open by then, or has been answered.
        return self._inbound.holds(client_id, request_id) or self._requests.find(client_id, request_id) is not None

    def reject_early(self, client_id: bytes, message: EngineCoreRequest) -> EngineMessage | None:
        """Return the answer to a request for which there is no room; None accepts it, to be received.

        For the socket's thread, so that a rejection does not wait for the step to end.
        """
        try:
            self._check_room(client_id, message, self._inbound)
        except RejectedError as error:
            if self.is_open(client_id, message.request_id):  # its output would be taken for the other's
                return _in_use(message)
            return EngineCoreOutputs([_rejection(message, error)], None, self._clock())
        self._inbound.accept(client_id, message)
        return None

    def receive(self, client_id: bytes, message: EngineCoreRequest) -> None:
        """Queue a request, or answer it with an error."""
        self._inbound.receive(client_id, message)
        try:
            if self._requests.find(client_id, message.request_id) is None:
                self._add(client_id, message)
            else:
                self._outputs.send(client_id, _in_use(message))
        except RejectedError as error:
            self._outputs.add(client_id, _rejection(message, error))
        finally:
            self._inbound.forget(client_id, message)

    def _add(self, client_id: bytes, message: EngineCoreRequest) -> None:
        limits, other = self._limits, None
        if not self._takes_adapters:
            check_no_adapter(message)
        for check in self._checks:
            check(message)
        self._check_room(client_id, message)
        kind = decoding_type(message)
        kind.check(message, limits)
        self._bounds.check_size(message)
        if message.shares_prompt_with is not None:
            other = self._requests.find(client_id, message.shares_prompt_with)
        if other is not None:
            check_shared_prompt(message, other)
        grammar = self._constrained.find(client_id, message)
        now, decoding = self._clock(), kind(message, limits)
        request = Request.from_message(
            client_id, message, decoding, seed=self._seeds.getrandbits(63), now=now, limits=limits,
            sequences=self._sequences,
        )  # fmt: skip
        self._constrained.begin(request, grammar)
        for begin in self._begin:
            begin(request)
        if request.status is RequestStatus.WAITING and (status := held_status(self._held_status, request)) is not None:
            request.status = status
        request.record(EventType.QUEUED, now)
        if other is not None:
            share_prompt(request, other, limits)
        self._requests.add(request)

    def _check_room(self, client_id: bytes, message: EngineCoreRequest, inbound: InboundRequests = NO_REQUESTS) -> None:
        """Raise RejectedError if the queue is full, counting the inbound requests."""
        if self.draining:
            raise ShuttingDownError("the engine is shutting down and takes no more requests; send it to another engine")
        self._bounds.check(client_id, message, inbound)


def _in_use(message: EngineCoreRequest) -> ErrorMessage:
    return ErrorMessage(
        f"request_id {message.request_id!r} is in use by a request that has not ended; choose another id"
    )


def _rejection(message: EngineCoreRequest, error: RejectedError) -> EngineCoreOutput:
    return EngineCoreOutput(
        message.request_id, finish_reason=FinishReason.ERROR, error=str(error), error_kind=error.kind
    )
