"""The open requests: from their arrival to their terminal output, by client and id, and by deadline."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Sequence

from quire.engine_core.feature import Feature, hooks
from quire.engine_core.grammar.constrained import ConstrainedRequests
from quire.engine_core.memory import estimate_bytes
from quire.engine_core.outputs import Outputs
from quire.engine_core.request import Request, RequestStatus
from quire.engine_core.scheduling.scheduler import Scheduler
from quire.protocol.messages import EngineCoreOutput, ErrorKind, FinishReason

_FEW = 64  # finished requests that the heap may keep in any case


class OpenRequests:
    """Every request that has not ended. Each ends with one terminal output, and gives back all that it holds."""

    def __init__(
        self,
        scheduler: Scheduler,
        constrained: ConstrainedRequests,
        outputs: Outputs,
        clock: Callable[[], float],
        features: Sequence[Feature] = (),
    ) -> None:
        self._scheduler = scheduler
        self._constrained = constrained
        self._outputs = outputs
        self._add, self._remove = hooks(features, Feature.add), hooks(features, Feature.remove)
        self._clock = clock
        self._by_client: dict[bytes, dict[str, Request]] = {}
        self._deadlines = Deadlines()
        self.num_bytes = 0  # of memory, by their estimates
        self._bytes: dict[Request, int] = {}  # of each

    def __bool__(self) -> bool:
        return bool(self._by_client)

    def __iter__(self) -> Iterator[Request]:
        for own in self._by_client.values():
            yield from own.values()

    @property
    def clients(self) -> list[bytes]:
        """Ids of the clients that have open requests."""
        return list(self._by_client)

    def find(self, client_id: bytes, request_id: str) -> Request | None:
        """Return a client's request, if it is open."""
        own = self._by_client.get(client_id)
        return None if own is None else own.get(request_id)

    def of_client(self, client_id: bytes) -> list[Request]:
        """Return a client's requests, the latest first: no successor starts in the place of one that ends with it."""
        return list(reversed(self._by_client.get(client_id, {}).values()))

    def add(self, request: Request) -> None:
        """Add and queue a request, whose id its client does not use for another one."""
        self._scheduler.add(request)
        self._by_client.setdefault(request.client_id, {})[request.request_id] = request
        self._bytes[request] = num_bytes = estimate_bytes(request.message)
        self.num_bytes += num_bytes
        self._deadlines.add(request)
        for add in self._add:
            add(request)

    def finish(
        self, request: Request, reason: FinishReason, error: str | None = None, kind: ErrorKind = ErrorKind.FAILED
    ) -> None:
        """End a request between tokens: its terminal output carries none. `kind` is that of an ERROR."""
        now = self._clock()
        output = EngineCoreOutput(request.request_id, error=error)
        output.error_kind = kind if reason is FinishReason.ERROR else None
        self._outputs.add(request.client_id, request.conclude(output, reason, now))
        self.release(request, output, now)

    def release(self, request: Request, output: EngineCoreOutput, now: float) -> None:
        """Take back all that a request holds whose terminal output is on its way."""
        for remove in self._remove:
            remove(request, output.finish_reason, now)
        self._scheduler.remove(request)
        self._constrained.end(request)
        if request.num_output_tokens:
            self._scheduler.admission.ended()
        request.status = RequestStatus.FINISHED
        self.num_bytes -= self._bytes.pop(request)
        own = self._by_client[request.client_id]
        del own[request.request_id]
        if not own:
            del self._by_client[request.client_id]

    def overdue(self, now: float) -> Iterator[Request]:
        """Yield the requests whose deadline has passed; each once."""
        return self._deadlines.take_overdue(now)


class Deadlines:
    """A heap of the requests that have a deadline. It drops finished ones when they outnumber the others."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Request]] = []
        self._max_size = _FEW

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, request: Request) -> None:
        """Add a request, if it has a deadline."""
        if request.deadline == math.inf:
            return
        heapq.heappush(self._heap, (request.deadline, request.number, request))
        if len(self._heap) > self._max_size:
            self._heap = [entry for entry in self._heap if not entry[2].is_finished]
            heapq.heapify(self._heap)
            self._max_size = max(_FEW, 2 * len(self._heap))

    def take_overdue(self, now: float) -> Iterator[Request]:
        """Remove and yield the requests that have not ended by their deadline."""
        while self._heap and self._heap[0][0] <= now:
            request = heapq.heappop(self._heap)[2]
            if not request.is_finished:
                yield request
