"""Sends a workload to a target, and collects what its requests feel."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any, Protocol

from quire.frontend.evaluation.replay.ahead import Ahead, Prepared
from quire.frontend.evaluation.replay.clock import Clock
from quire.frontend.evaluation.replay.collector import rare_collections
from quire.frontend.evaluation.replay.extent import Extent
from quire.frontend.evaluation.replay.load import Load
from quire.frontend.evaluation.replay.record import Outcome, RequestRecord, Sample
from quire.frontend.evaluation.replay.sessions import Sessions
from quire.frontend.evaluation.replay.stolen import StolenTime
from quire.frontend.evaluation.replay.target import Send, Target, Tokens, prepare, send_within
from quire.frontend.evaluation.replay.warm_up import warm_up
from quire.frontend.evaluation.workload.request import WorkloadRequest

_SAMPLE_SECONDS = 0.25
_COUNTING_SECONDS = 5.0
_RECENT = 500


class Collector(Protocol):
    """Takes what a run measures; `quire.frontend.evaluation.report.run.Run` is one."""

    def add(self, record: RequestRecord) -> None:
        """A request has ended."""

    def sample(self, sample: Sample) -> None:
        """The target has told how it is."""

    def end(self, seconds: float, interrupted: str | None = None, *, stolen: float | None = None) -> None:
        """The run is over. `stolen`: of this host's CPU time."""


class Replay:
    """One run, made on the event loop that it works on.

    What it tells meanwhile: `num_sent`, `outcomes` of the requests that have ended, the `recent` ones of these, and the
    `open` ones by index; `has_begun` once the warm-up is over and the clock runs. `num_short`: answers that are whole,
    and have fewer tokens than the workload wants. `cold`: requests of the warm-up that did not complete.

    `extent`: how long the workload is, as far as is known before it is read.
    """

    def __init__(
        self, target: Target, collector: Collector, tokens: Tokens, load: Load, extent: Extent | None = None
    ) -> None:
        self.clock = Clock()
        self.has_begun = False
        self.num_sent = 0
        self.num_short = 0
        self.cold: list[RequestRecord] = []
        self.outcomes: Counter[Outcome] = Counter()
        self.open: dict[int, RequestRecord] = {}
        self.recent: deque[RequestRecord] = deque(maxlen=_RECENT)
        self._target = target
        self._collector = collector
        self._tokens = tokens
        self._load = load
        self._extent = extent
        self._ahead: Ahead | None = None
        self._sessions = Sessions(self.clock)
        self._room: AbstractAsyncContextManager[Any] = nullcontext()
        if load.max_concurrency is not None:
            self._room = asyncio.Semaphore(load.max_concurrency)
        self._stopped: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._verdict = Outcome.UNFINISHED  # on what is under way when the run ends before its time
        self._reason = ""
        self._seconds = 0.0  # of the measuring: what comes after it takes its time too
        self._stolen: float | None = None
        self._error: BaseException | None = None

    async def run(self, requests: Iterable[WorkloadRequest]) -> str | None:
        """Send all requests and wait for their ends; returns None, or what has ended the run before that.

        The collector gets every request of the workload, also those that could not be sent any more. What reading the
        workload raises, or a defect, is raised once the collector has what was measured.
        """
        working = asyncio.create_task(self._work(iter(requests)))
        dying = asyncio.create_task(self._target.wait_dead())
        try:
            await asyncio.wait((working, dying, self._stopped), return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                is_dead = dying.done()
                self._reason = dying.result() if is_dead else self._stopped.result()
                self._verdict = Outcome.ERRORED if is_dead else Outcome.UNFINISHED
        finally:
            dying.cancel()
            working.cancel()
            await asyncio.wait((working, dying))
        if not working.cancelled() and (error := working.exception()) is not None:
            self._error = _first(error)
            self._reason = f"{type(self._error).__name__}: {self._error}"
        self._collector.end(self._seconds, self._reason or None, stolen=self._stolen)
        if self._error is not None:
            raise self._error
        return self._reason or None

    @property
    def share(self) -> float | None:
        """About how much of the run is over; None where it is not known how long the workload is."""
        if self._ahead is None or not self.has_begun:
            return None
        elapsed = self.clock.now() if self._load.concurrency is None else None
        return self._ahead.extent.share(self.outcomes.total(), elapsed)

    def stop(self, reason: str) -> None:
        """End the run now, with what has been measured."""
        if not self._stopped.done():
            self._stopped.set_result(reason)

    async def _work(self, source: Iterator[WorkloadRequest]) -> None:
        first = list(itertools.islice(source, self._load.warm_up))
        self._ahead = ahead = Ahead(itertools.chain(first, source), self._prepare, self._extent)
        try:
            for record in await warm_up(self._target, self._tokens, first, self._load):
                self._collector.add(record)
                if record.outcome is not Outcome.COMPLETED:
                    self.cold.append(record)
            await ahead.filled()
            with rare_collections():
                await self._measure(ahead)
        finally:
            await asyncio.to_thread(ahead.close)
            self._count_unsent(ahead.rest())

    async def _measure(self, ahead: Ahead) -> None:
        self.clock.begin, self.has_begun = time.monotonic(), True
        stolen = StolenTime()
        sampling = asyncio.create_task(self._sample())
        try:
            if self._load.concurrency is None:
                await self._open_loop(ahead)
            else:
                await self._closed_loop(ahead, self._load.concurrency)
        finally:
            self._seconds = self.clock.now()
            self._stolen = stolen.share
            sampling.cancel()

    async def _open_loop(self, ahead: Ahead) -> None:
        async with asyncio.TaskGroup() as group:
            while (prepared := await self._next(ahead)) is not None:
                arrival = prepared.request.arrival
                try:
                    # Also when it is late already: what was started before has to be sent before.
                    await asyncio.sleep(max(0.0, arrival - self.clock.now()))
                except asyncio.CancelledError:
                    ahead.put_back(prepared)
                    raise
                group.create_task(self._serve(prepared, arrival))

    async def _closed_loop(self, ahead: Ahead, concurrency: int) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(self._user(ahead))

    async def _user(self, ahead: Ahead) -> None:
        free = self.clock.now()
        while (prepared := await self._next(ahead)) is not None:
            await self._serve(prepared, free)
            free = self.clock.now()

    async def _next(self, ahead: Ahead) -> Prepared | None:
        """The next request. A workload that can't be read any further ends here; what is under way goes on."""
        try:
            return await ahead.next()
        except Exception as error:  # noqa: BLE001 - whatever it is, it is raised at the run's end
            self._error, self._reason = error, str(error)
            return None

    async def _serve(self, prepared: Prepared, due: float) -> None:
        request = prepared.request
        send = None if self._sessions.must_wait(request) else prepared.send  # many may wait: they keep no prompts
        record = _record(prepared.index, request, due)
        try:
            async with self._sessions.turn(request, due) as arrival, self._room:
                if send is None:
                    send = await asyncio.to_thread(prepare, self._target, request, self._tokens)
                record.arrival = arrival
                await self._send(send, record)
        finally:
            self._collector.add(record)

    async def _send(self, send: Send, record: RequestRecord) -> None:
        self.num_sent += 1
        self.open[record.index] = record
        record.sent, record.was_sent = self.clock.now(), True
        try:
            await send_within(self._load.request_timeout, send, record, self.clock)
        except asyncio.CancelledError:
            record.outcome, record.error = self._verdict, self._reason or None
            raise
        finally:
            record.ended = self.clock.now()
            del self.open[record.index]
            self.outcomes[record.outcome] += 1
            self.num_short += record.is_short
            self.recent.append(record)

    def _prepare(self, request: WorkloadRequest) -> Send | None:
        """Prepare a request, but not one that will wait for its turn, of which there may be many at once."""
        return None if self._sessions.must_wait(request) else prepare(self._target, request, self._tokens)

    async def _sample(self) -> None:
        while (sample := await self._target.sample(self.clock)) is not None:
            self._collector.sample(sample)
            await asyncio.sleep(_SAMPLE_SECONDS)

    def _count_unsent(self, rest: Iterator[tuple[int, WorkloadRequest]]) -> None:
        """Of a workload that takes long to read, only the beginning of the rest."""
        deadline, now = time.monotonic() + _COUNTING_SECONDS, self.clock.now()
        why = ""
        try:
            for index, request in rest:
                self._collector.add(_record(index, request, now if self._load.concurrency else request.arrival))
                if time.monotonic() > deadline:
                    why = "it is too long"
                    break
        except (ValueError, TimeoutError) as error:  # also for a trace that is broken there
            why = str(error)
        if why:
            self._reason += f"; the rest of the workload is not counted as unfinished: {why}"


def _first(error: BaseException) -> BaseException:
    """The error of the first task that failed, of those that a group has gathered."""
    return _first(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error


def _record(index: int, request: WorkloadRequest, arrival: float) -> RequestRecord:
    """Of a request that has not been sent yet."""
    return RequestRecord(
        index, arrival, arrival, request.prompt_tokens, request.output_tokens, ended=arrival, was_sent=False
    )
