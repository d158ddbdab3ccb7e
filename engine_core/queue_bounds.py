"""The bounds of the waiting queue, in requests and in prompt tokens.

One tenant may fill the queue. Others still get in then, up to an equal share of the bounds each, so that n tenants
together can exceed a bound by the factor 1 + 1/2 + ... + 1/n at most; of more tenants than may wait, none gets in.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from quire.engine_core.memory import MemoryGuard, estimate_bytes
from quire.engine_core.request import TenantName, tenant_of
from quire.engine_core.scheduling.waiting import WaitingQueue
from quire.engine_core.validation import OverloadedError, RejectedError
from quire.protocol.engine_shape import EngineShape
from quire.protocol.messages import EngineCoreRequest


class QueueLoad(NamedTuple):
    """Requests, and the tokens of their prompts."""

    num_requests: int = 0
    num_tokens: int = 0

    def plus(self, other: QueueLoad) -> QueueLoad:
        """Return the sum."""
        return QueueLoad(self.num_requests + other.num_requests, self.num_tokens + other.num_tokens)


NO_LOAD = QueueLoad()


class InboundRequests:
    """Requests that the socket's thread has accepted and the step loop has not received yet."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loads: dict[TenantName, QueueLoad] = {}
        self._total = NO_LOAD
        self._ids: Counter[tuple[bytes, str]] = Counter()  # an id may come again before the first is received
        self.num_bytes = 0  # of memory, by their estimates

    def accept(self, client_id: bytes, message: EngineCoreRequest) -> None:
        """Count a request; on the socket's thread."""
        with self._lock:
            self._count(tenant_of(client_id, message), QueueLoad(1, len(message.prompt_token_ids)))
            self.num_bytes += estimate_bytes(message)
            self._ids[client_id, message.request_id] += 1

    def receive(self, client_id: bytes, message: EngineCoreRequest) -> None:
        """Stop counting a request; in the step loop, which counts it from here on. No effect without a socket."""
        tenant = tenant_of(client_id, message)
        with self._lock:
            if tenant in self._loads:
                self._count(tenant, QueueLoad(-1, -len(message.prompt_token_ids)))
                self.num_bytes -= estimate_bytes(message)

    def forget(self, client_id: bytes, message: EngineCoreRequest) -> None:
        """Forget an id; in the step loop, once it has added or rejected the request. No effect without a socket."""
        key = client_id, message.request_id
        with self._lock:
            if self._ids[key] > 1:
                self._ids[key] -= 1
            else:
                del self._ids[key]

    def holds(self, client_id: bytes, request_id: str) -> bool:
        """Return True if a request with this id has been accepted, and the step loop is not done with it."""
        return (client_id, request_id) in self._ids

    @property
    def total(self) -> QueueLoad:
        """Load of all tenants."""
        return self._total

    @property
    def num_tenants(self) -> int:
        """Number of tenants that have one."""
        return len(self._loads)

    def load_of(self, tenant: TenantName) -> QueueLoad:
        """Return the load of a tenant."""
        return self._loads.get(tenant, NO_LOAD)

    def _count(self, tenant: TenantName, more: QueueLoad) -> None:
        self._total = self._total.plus(more)
        load = self.load_of(tenant).plus(more)
        if load.num_requests:
            self._loads[tenant] = load
        else:
            del self._loads[tenant]


NO_REQUESTS = InboundRequests()
"""For the step loop, which has received what it asks about."""


class QueueBounds:
    """The bounds of a waiting queue, and of the memory of all open requests. May be asked by any thread."""

    def __init__(
        self,
        waiting: WaitingQueue,
        limits: EngineShape,
        memory: MemoryGuard | None = None,
        open_bytes: Callable[[], int] = int,
    ) -> None:
        """`open_bytes` returns the estimated bytes of the open requests."""
        self._waiting = waiting
        self._limits = limits
        self._memory = memory
        self._open_bytes = open_bytes

    def check(self, client_id: bytes, message: EngineCoreRequest, inbound: InboundRequests = NO_REQUESTS) -> None:
        """Raise OverloadedError if there is no room for a request after those that wait and the inbound ones."""
        limits, waiting, tenant = self._limits, self._waiting, tenant_of(client_id, message)
        if self._memory is not None:
            self._check_memory(self._memory, message, inbound.num_bytes)
        # Requests that ran in an engine which is gone come back all at once, beside those that waited there.
        returning = limits.max_num_seqs if message.generated_token_ids else 0
        own = inbound.load_of(tenant).plus(QueueLoad(*waiting.load_of(tenant)))
        total = inbound.total.plus(QueueLoad(len(waiting), waiting.num_tokens))
        most, num_tokens = limits.max_waiting_requests_per_client, len(message.prompt_token_ids)
        if most is not None and own.num_requests >= most + returning:
            raise OverloadedError(
                f"{own.num_requests} requests of this client are waiting, and {most} may; wait until some have ended, "
                "or start the engine with a higher --max-waiting-requests-per-client"
            )
        num_tenants = max(waiting.num_tenants, inbound.num_tenants) + (own.num_requests == 0)
        if (
            min(total.num_requests + 1, (own.num_requests + 1) * num_tenants) > limits.max_waiting_requests + returning
            or min(total.num_tokens + num_tokens, (own.num_tokens + num_tokens) * num_tenants)
            > limits.max_waiting_tokens
        ):
            raise OverloadedError(
                f"the engine is overloaded: {total.num_requests} requests with {total.num_tokens} prompt tokens are "
                f"waiting, and {limits.max_waiting_requests} requests with {limits.max_waiting_tokens} tokens may; "
                "try again later"
            )

    def check_size(self, message: EngineCoreRequest) -> None:
        """Raise RejectedError for a request, valid otherwise, that takes too much memory to be served ever."""
        num_bytes, most = estimate_bytes(message), math.inf if self._memory is None else self._memory.request_bytes
        if num_bytes > most:
            raise RejectedError(
                f"the request takes {num_bytes} bytes of memory, and all open ones together may take {most}; shorten "
                "it, or start the engine with a higher --memory-limit"
            )

    def _check_memory(self, memory: MemoryGuard, message: EngineCoreRequest, inbound_bytes: int) -> None:
        """Raise OverloadedError if there is no memory; not for a request that an engine which is gone had accepted."""
        num_bytes, open_bytes = estimate_bytes(message), inbound_bytes + self._open_bytes()
        is_too_much = num_bytes <= memory.request_bytes < open_bytes + num_bytes  # alone it is: see `check_size`
        if (memory.is_full or is_too_much) and not message.generated_token_ids:
            raise OverloadedError(
                f"the engine is overloaded: {memory.words}, and open requests take {open_bytes} of the "
                f"{memory.request_bytes} that they may; try again later, or start the engine with a higher "
                "--memory-limit"
            )
