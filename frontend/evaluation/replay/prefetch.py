"""Prefetch of requests: they are read and prepared ahead of their time, so that they can be sent on time."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from quire.frontend.evaluation.replay.load import Extent
from quire.frontend.evaluation.replay.target import Send
from quire.frontend.evaluation.workload.request import WorkloadRequest

_MOST_REQUESTS = 4096
_MOST_TOKENS = 1 << 20
_JOIN_SECONDS = 2.0  # a reader that is still skipping bad rows of a huge file is abandoned


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A request of the workload, its place in it, and how to send it; `send` is None if it is to be prepared later."""

    index: int
    request: WorkloadRequest
    send: Send | None


class Prefetcher:
    """A thread that reads a workload and prepares its requests, up to limits on their number and tokens.

    The prompts of a long trace would not fit into memory, and making one when its request is due would delay others; so
    would making the next one whenever one is sent. So the thread resumes when half of the requests are taken.
    """

    def __init__(
        self,
        requests: Iterator[WorkloadRequest],
        prepare: Callable[[WorkloadRequest], Send | None],
        extent: Extent | None = None,
    ) -> None:
        self.extent = extent or Extent()  # exact once the whole workload is read
        self._requests = requests
        self._prepare = prepare
        self._ready: deque[PreparedRequest] = deque()
        self._num_tokens = 0
        self._num_read = 0
        self._error: Exception | None = None
        self._is_over = False  # no more is read
        self._changed = threading.Condition()
        self._loop = asyncio.get_running_loop()
        self._event = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="quire-replay-prefetch", daemon=True)
        self._thread.start()

    async def filled(self) -> None:
        """Wait until the limits are reached, or the whole workload is prepared."""
        await self._until(lambda: self._is_over or self._is_full)

    async def next(self) -> PreparedRequest | None:
        """Return the next request of the workload, None at its end. Raises what reading it raised."""
        await self._until(lambda: self._is_over or bool(self._ready))
        if self._ready:
            return self._take()
        if self._error is not None:
            raise self._error
        return None

    def put_back(self, prepared: PreparedRequest) -> None:
        """Return the request that was taken last and not sent."""
        with self._changed:
            self._ready.appendleft(prepared)
            self._num_tokens += prepared.request.prompt_tokens

    def close(self) -> None:
        """Stop reading, after the request that is being prepared."""
        with self._changed:
            self._is_over = True
            self._changed.notify()
        self._thread.join(_JOIN_SECONDS)

    def rest(self) -> Iterator[tuple[int, WorkloadRequest]]:
        """After `close`, yield the requests that were not taken. Raises TimeoutError if the thread is still reading."""
        while self._ready:
            prepared = self._ready.popleft()
            yield prepared.index, prepared.request
        if self._thread.is_alive():
            raise TimeoutError("its next request takes long to read")
        if self._error is None:
            yield from enumerate(self._requests, self._num_read)

    @property
    def _is_full(self) -> bool:
        return self._has(1.0)

    def _has(self, share: float) -> bool:
        """Return True if this share of one of the limits is reached."""
        return len(self._ready) >= share * _MOST_REQUESTS or self._num_tokens >= share * _MOST_TOKENS

    async def _until(self, is_so: Callable[[], bool]) -> None:
        while not is_so():
            self._event.clear()
            if not is_so():  # else it came about before the event was cleared
                await self._event.wait()

    def _take(self) -> PreparedRequest:
        with self._changed:
            prepared = self._ready.popleft()
            self._num_tokens -= prepared.request.prompt_tokens
            if not self._has(0.5):
                self._changed.notify()
        return prepared

    # The rest runs on the thread.

    def _run(self) -> None:
        last = 0.0
        try:
            for request in self._requests:
                last = request.arrival
                prepared = PreparedRequest(self._num_read, request, self._prepare(request))
                self._num_read += 1
                if not self._put(prepared):
                    return
                time.sleep(0)  # let the event loop send requests and read answers
            self.extent = Extent(self._num_read, last)
        except Exception as error:  # noqa: BLE001 - raised again where requests are taken
            self._error = error
        finally:
            self._is_over = True
            self._notify()

    def _put(self, prepared: PreparedRequest) -> bool:
        """Keep a request, and wait until more fit; return False when no more are wanted."""
        with self._changed:
            self._ready.append(prepared)
            self._num_tokens += prepared.request.prompt_tokens
            self._notify()
            if self._is_full:
                self._changed.wait_for(lambda: self._is_over or not self._has(0.5))
            return not self._is_over

    def _notify(self) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._event.set)
