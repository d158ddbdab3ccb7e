"""Runner: sends a workload to a target, after a warm-up, and collects the records of its requests."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import Any, Protocol

import msgspec

from quire.frontend.evaluation.replay.interference import StealTime, rare_collections
from quire.frontend.evaluation.replay.load import Extent, Load
from quire.frontend.evaluation.replay.prefetch import Prefetcher, PreparedRequest
from quire.frontend.evaluation.replay.record import Outcome, RequestRecord, RunClock, TargetSample
from quire.frontend.evaluation.replay.target import Send, Target, Tokens, prepare, send_within
from quire.frontend.evaluation.workload.blocks import Prompts
from quire.frontend.evaluation.workload.request import WorkloadRequest

_AT_ONCE = 16
_OTHER_BLOCKS = 1 << 40  # above the blocks of any trace


async def warm_up(
    target: Target, tokens: Tokens, requests: Sequence[WorkloadRequest], load: Load
) -> list[RequestRecord]:
    """Send requests of these lengths with other tokens, wait for them, and empty the prefix cache.

    Their times count from the call.
    """
    if not requests:
        return []
    clock = RunClock()
    room = asyncio.Semaphore(load.concurrency or load.max_concurrency or _AT_ONCE)
    records = [
        RequestRecord(index, 0.0, 0.0, request.prompt_tokens, request.output_tokens, is_warm_up=True)
        for index, request in enumerate(requests)
    ]

    async def send(request: WorkloadRequest, record: RequestRecord) -> None:
        prepared = await asyncio.to_thread(prepare, target, _apart(request), tokens)
        async with room:
            record.arrival = record.sent = clock.now()
            await send_within(load.request_timeout, prepared, record, clock)
            record.ended = clock.now()

    async with asyncio.TaskGroup() as group:
        for request, record in zip(requests, records, strict=True):
            group.create_task(send(request, record))
    await target.reset_cache()
    return records


def _apart(request: WorkloadRequest) -> WorkloadRequest:
    """Return a copy that shares no tokens with the workload, nor with an earlier warm-up of the same target.

    So it hits no cached prefix, and leaves none that the workload could hit. Text stays as it is.
    """
    first = _OTHER_BLOCKS + random.getrandbits(32)
    blocks = tuple(first + place for place in range(len(request.blocks)))
    return msgspec.structs.replace(request, blocks=blocks, session=None)


class _Turn:
    """The last request of a session so far; `ended` is in seconds since the run began."""

    __slots__ = ("ended", "over")

    def __init__(self) -> None:
        self.over = asyncio.Event()
        self.ended = 0.0


class Sessions:
    """Last turn of each session."""

    def __init__(self, clock: RunClock) -> None:
        self._clock = clock
        self._turns: dict[str, _Turn] = {}

    def must_wait(self, request: WorkloadRequest) -> bool:
        """Return True if an earlier turn of the request's session has begun and not ended. Safe on any thread."""
        turn = None if request.session is None else self._turns.get(request.session)
        return turn is not None and not turn.over.is_set()

    @asynccontextmanager
    async def turn(self, request: WorkloadRequest, due: float) -> AsyncIterator[float]:
        """Wait for the request's turn, which lasts as long as the `with`; yield the time at which it may be sent.

        That is `due`, or `delay` after the end of the previous turn, if that is later.
        """
        if request.session is None:
            yield due
            return
        before, own = self._turns.get(request.session), _Turn()
        self._turns[request.session] = own
        try:
            if before is not None:
                await before.over.wait()
                due = max(due, before.ended + request.delay)
                await asyncio.sleep(max(0.0, due - self._clock.now()))
            yield due
        finally:
            own.ended = self._clock.now()
            own.over.set()


_SAMPLE_SECONDS = 0.25
_COUNTING_SECONDS = 5.0
_RECENT = 500


class RunCollector(Protocol):
    """Collector of what a run measures, such as the `Run` of a report."""

    def add(self, record: RequestRecord) -> None:
        """Take a request that has ended."""

    def sample(self, sample: TargetSample) -> None:
        """Take a sample of the target's state."""

    def end(self, seconds: float, interrupted: str | None = None, *, steal: float | None = None) -> None:
        """End the run. `steal`: share of this host's CPU time that other guests had."""


class Replay:
    """One run, constructed on the event loop on which it runs.

    Its progress: `num_sent`, `outcomes` of the requests that have ended, the most `recent` of these, and the `open`
    ones by index; `has_begun` is set once the warm-up is over and the clock runs. `num_short` counts complete answers
    with fewer tokens than the workload wants, `cold` has the requests of the warm-up that did not complete.

    `extent`: length of the workload, as far as it is known in advance.
    """

    def __init__(
        self, target: Target, collector: RunCollector, tokens: Tokens, load: Load, extent: Extent | None = None
    ) -> None:
        self.clock = RunClock()
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
        self._prefetcher: Prefetcher | None = None
        self._sessions = Sessions(self.clock)
        self._room: AbstractAsyncContextManager[Any] = nullcontext()
        if load.max_concurrency is not None:
            self._room = asyncio.Semaphore(load.max_concurrency)
        self._stopped: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._cut_off = Outcome.UNFINISHED  # outcome of requests in flight when the run is interrupted
        self._reason = ""
        self._seconds = 0.0  # of the measurement, without the end of the run
        self._steal: float | None = None
        self._error: BaseException | None = None

    async def run(self, requests: Iterable[WorkloadRequest]) -> str | None:
        """Send all requests and wait for their ends; return None, or what interrupted the run.

        The collector gets every request of the workload, including those that could no longer be sent. An error in
        reading the workload, or a defect, is raised once the collector has everything that was measured.
        """
        working = asyncio.create_task(self._work(iter(requests)))
        dying = asyncio.create_task(self._target.wait_dead())
        try:
            await asyncio.wait((working, dying, self._stopped), return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                is_dead = dying.done()
                self._reason = dying.result() if is_dead else self._stopped.result()
                self._cut_off = Outcome.ERRORED if is_dead else Outcome.UNFINISHED
        finally:
            dying.cancel()
            working.cancel()
            await asyncio.wait((working, dying))
        if not working.cancelled() and (error := working.exception()) is not None:
            self._error = _first(error)
            self._reason = f"{type(self._error).__name__}: {self._error}"
        self._collector.end(self._seconds, self._reason or None, steal=self._steal)
        if self._error is not None:
            raise self._error
        return self._reason or None

    @property
    def share(self) -> float | None:
        """Approximate share of the run that is over; None if the length of the workload is unknown."""
        if self._prefetcher is None or not self.has_begun:
            return None
        elapsed = self.clock.now() if self._load.concurrency is None else None
        return self._prefetcher.extent.share(self.outcomes.total(), elapsed)

    def stop(self, reason: str) -> None:
        """End the run now, with what has been measured."""
        if not self._stopped.done():
            self._stopped.set_result(reason)

    async def _work(self, source: Iterator[WorkloadRequest]) -> None:
        first = list(itertools.islice(source, self._load.warm_up))
        self._prefetcher = prefetcher = Prefetcher(itertools.chain(first, source), self._prepare, self._extent)
        try:
            for record in await warm_up(self._target, self._tokens, first, self._load):
                self._collector.add(record)
                if record.outcome is not Outcome.COMPLETED:
                    self.cold.append(record)
            await prefetcher.filled()
            with rare_collections():
                await self._measure(prefetcher)
        finally:
            await asyncio.to_thread(prefetcher.close)
            self._count_unsent(prefetcher.rest())

    async def _measure(self, prefetcher: Prefetcher) -> None:
        self.clock.begin, self.has_begun = time.monotonic(), True
        steal = StealTime()
        sampling = asyncio.create_task(self._sample())
        try:
            if self._load.concurrency is None:
                await self._open_loop(prefetcher)
            else:
                await self._closed_loop(prefetcher, self._load.concurrency)
        finally:
            self._seconds = self.clock.now()
            self._steal = steal.share
            sampling.cancel()

    async def _open_loop(self, prefetcher: Prefetcher) -> None:
        async with asyncio.TaskGroup() as group:
            while (prepared := await self._next(prefetcher)) is not None:
                arrival = prepared.request.arrival
                try:
                    # Even if it is late already: requests that were started earlier have to be sent earlier.
                    await asyncio.sleep(max(0.0, arrival - self.clock.now()))
                except asyncio.CancelledError:
                    prefetcher.put_back(prepared)
                    raise
                group.create_task(self._serve(prepared, arrival))

    async def _closed_loop(self, prefetcher: Prefetcher, concurrency: int) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(self._user(prefetcher))

    async def _user(self, prefetcher: Prefetcher) -> None:
        free = self.clock.now()
        while (prepared := await self._next(prefetcher)) is not None:
            await self._serve(prepared, free)
            free = self.clock.now()

    async def _next(self, prefetcher: Prefetcher) -> PreparedRequest | None:
        """Return the next request. A workload that fails to be read ends here; requests in flight go on."""
        try:
            return await prefetcher.next()
        except Exception as error:  # noqa: BLE001 - raised at the run's end
            self._error, self._reason = error, str(error)
            return None

    async def _serve(self, prepared: PreparedRequest, due: float) -> None:
        request = prepared.request
        send = None if self._sessions.must_wait(request) else prepared.send  # many may wait, and keep no prompts
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
            record.outcome, record.error = self._cut_off, self._reason or None
            raise
        finally:
            record.ended = self.clock.now()
            del self.open[record.index]
            self.outcomes[record.outcome] += 1
            self.num_short += record.is_short
            self.recent.append(record)

    def _prepare(self, request: WorkloadRequest) -> Send | None:
        """Prepare a request, except one that will wait for its turn, as many may do at once."""
        return None if self._sessions.must_wait(request) else prepare(self._target, request, self._tokens)

    async def _sample(self) -> None:
        while (sample := await self._target.sample(self.clock)) is not None:
            self._collector.sample(sample)
            await asyncio.sleep(_SAMPLE_SECONDS)

    def _count_unsent(self, rest: Iterator[tuple[int, WorkloadRequest]]) -> None:
        """Count the rest of the workload as unfinished, for some seconds at most."""
        deadline, now = time.monotonic() + _COUNTING_SECONDS, self.clock.now()
        why = ""
        try:
            for index, request in rest:
                self._collector.add(_record(index, request, now if self._load.concurrency else request.arrival))
                if time.monotonic() > deadline:
                    why = "it is too long"
                    break
        except (ValueError, TimeoutError) as error:  # the trace may be broken there
            why = str(error)
        if why:
            self._reason += f"; the rest of the workload is not counted as unfinished: {why}"


def _first(error: BaseException) -> BaseException:
    """Return the error of the first task of a group that failed."""
    return _first(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error


def _record(index: int, request: WorkloadRequest, arrival: float) -> RequestRecord:
    """Return the record of a request that is not sent yet."""
    return RequestRecord(
        index, arrival, arrival, request.prompt_tokens, request.output_tokens, ended=arrival, was_sent=False
    )


_FEW_TOKENS = 1000  # that every model has, for servers that do not report their vocabulary

Shown = Callable[[Replay], AbstractAsyncContextManager[None]]
"""Display of a run's progress."""


class Runs:
    """Runs until one is stopped. `vocab_size`: upper limit of synthetic token ids; None: the target's."""

    def __init__(
        self, target: Target, *, vocab_size: int | None = None, shown: Shown = lambda replay: nullcontext()
    ) -> None:
        self.target = target
        self.vocab_size = vocab_size or target.info.vocab_size or _FEW_TOKENS
        self._shown = shown
        self._running: Replay | None = None
        self._stopped: str | None = None

    async def replay(
        self,
        collector: RunCollector,
        requests: Iterable[WorkloadRequest],
        load: Load,
        *,
        seed: int = 0,
        extent: Extent | None = None,
    ) -> str | None:
        """Make a run; return and raise what `Replay.run` does. `seed` determines the tokens of its prompts.

        `extent`: length of the workload, as far as it is known in advance.
        """
        prompts = Prompts(self.vocab_size, seed, avoid=self.target.info.special_token_ids)
        self._running = replay = Replay(self.target, collector, prompts.tokens, load, extent)
        if self._stopped is not None:
            replay.stop(self._stopped)
        try:
            async with self._shown(replay):
                return await replay.run(requests)
        finally:
            self._running = None

    def stop(self, reason: str) -> None:
        """End the current run, or else the next one, with what has been measured."""
        self._stopped = reason
        if self._running is not None:
            self._running.stop(reason)
