"""Runs scenes on an engine and tells what its steps take."""

from __future__ import annotations

import asyncio
import itertools
import platform
import random
import statistics
import time
from bisect import bisect_left
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from itertools import pairwise
from typing import NamedTuple

from quire.frontend.async_llm import AsyncLLM
from quire.frontend.calibration.fit import fit
from quire.frontend.calibration.scenes import RequestSize, Scene, families
from quire.frontend.calibration.steps import StepTimes
from quire.frontend.sampling import SamplingParams
from quire.protocol.messages import StepTrace
from quire.protocol.simulation import Calibration, ClientTime

Tell = Callable[[str], None]


async def calibrate(llm: AsyncLLM, seconds: float, tell: Tell = lambda _: None) -> Calibration:
    """Serves scenes for so many seconds; `tell` is told of each. The engine must have nothing else to do.

    Raises ValueError if the engine is busy, has not told its sizes or ends no request in that time, `EngineDeadError`
    when it dies.
    """
    shape = llm.engine_info.shape
    if shape is None:
        raise ValueError(f"the engine at {llm.engine_address} does not tell its sizes; start one of this version")
    stats = await llm.stats()
    if stats["running"] or stats["waiting"]:
        raise ValueError(f"the engine at {llm.engine_address} is serving others; calibrate one that is idle")
    stage = _Stage(llm)
    async with _traced(llm) as traces:
        await stage.play_all(families(shape), seconds, tell)
    steps = StepTimes(stage.of_plays(traces))
    step_time, error = fit(steps)
    return Calibration(
        model=llm.model,
        host=f"{platform.node()}, {_processor()}",
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        engine=shape,
        step=step_time,
        client=stage.client_time,
        steps=len(steps.seconds),
        error=error,
    )


@asynccontextmanager
async def _traced(llm: AsyncLLM) -> AsyncIterator[list[StepTrace]]:
    """What the engine does meanwhile; complete at the end."""
    traces: list[StepTrace] = []
    is_last = asyncio.Event()

    def take(trace: StepTrace) -> None:
        traces.append(trace)
        if trace.last:
            is_last.set()

    await llm.start_trace(take)
    try:
        yield traces
    finally:
        await llm.stop_trace()
    await is_last.wait()


class _Play(NamedTuple):
    """A scene was served from `begin` to `end`; `again`: not for the first time."""

    begin: float
    end: float
    again: bool


class _Stage:
    """Serves scenes by an engine, and notes how long its requests and their tokens were under way."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm
        self._dice = random.Random(0)
        self._plays: list[_Play] = []
        self._played: set[str] = set()
        self._to_engine: list[float] = []
        self._to_client: list[float] = []
        self._to_next: list[float] = []
        self._to_wake: list[float] = []

    @property
    def client_time(self) -> ClientTime:
        """The medians, of an engine and a client that have nothing else to do.

        Raises ValueError if not one request has ended.
        """
        if not self._to_engine:
            raise ValueError("no request has ended in the time that was given; calibrate for longer")
        times = self._to_engine, self._to_client, self._to_next or [0.0], self._to_wake
        return ClientTime(*map(statistics.median, times))

    async def play_all(self, families: list[list[Scene]], seconds: float, tell: Tell) -> None:
        """All scenes again and again, for so many seconds.

        What takes too long is cut off, and not played again; but the cheapest of a family always is.
        """
        begun = time.monotonic()
        for rounds in itertools.count():
            for number, family in enumerate(families, 1):
                share = 1.0 if rounds else number / len(families)  # at first there must be time for each
                await self._play_family(family, begun + share * seconds, tell)
            if time.monotonic() >= begun + seconds:
                return

    async def _play_family(self, family: list[Scene], deadline: float, tell: Tell) -> None:
        for number, scene in enumerate(family):
            begun = time.monotonic()
            if begun >= deadline:
                return
            is_whole = await self._play(scene, deadline)
            took = time.monotonic() - begun
            self._plays.append(_Play(begun, begun + took, scene.name in self._played))
            self._played.add(scene.name)
            tell(f"{scene.name}: {took:.2f} s{'' if is_whole else ', cut off'}")
            if not is_whole:
                del family[max(number, 1) :]
                return

    def of_plays(self, traces: list[StepTrace]) -> list[list[StepTrace]]:
        """The steps of each play. The first of a scene is left out where there is another: engines warm up."""
        plays = [play for play in self._plays if play.again] or self._plays
        begins = [trace.begin for trace in traces]
        return [traces[bisect_left(begins, play.begin) : bisect_left(begins, play.end)] for play in plays]

    async def _play(self, scene: Scene, deadline: float) -> bool:
        """Serve all requests of the scene; whether they have ended by the deadline. The others are aborted then."""
        requests = iter(scene.requests)
        begins: list[float] = []
        try:
            async with asyncio.timeout(deadline - time.monotonic()), asyncio.TaskGroup() as group:
                for _ in range(scene.concurrency):
                    group.create_task(self._serve(requests, begins, is_alone=scene.concurrency == 1))
        except TimeoutError:
            return False
        finally:
            self._to_next += [after - before for before, after in pairwise(begins)]
        return True

    async def _serve(self, requests: Iterator[RequestSize], begins: list[float], is_alone: bool) -> None:
        begins.append(time.monotonic())  # all that a scene begins with are sent at once
        for request in requests:
            await self._generate(request, is_alone)

    async def _generate(self, request: RequestSize, is_alone: bool) -> None:
        prompt = self._dice.choices(range(self._llm.vocab_size), k=request.prompt_tokens)
        params = SamplingParams(
            max_tokens=request.output_tokens, min_tokens=request.output_tokens, ignore_eos=True, detokenize=False
        )
        sent = time.monotonic()
        arrived, metrics = 0.0, None
        async for output in self._llm.generate({"prompt_token_ids": prompt}, params, output_kind="delta"):
            if metrics is None:
                arrived, metrics = time.monotonic(), output.metrics
        assert metrics is not None
        assert metrics.queued_time is not None
        assert metrics.first_token_time is not None
        assert metrics.first_scheduled_time is not None
        if is_alone:  # others would have it wait for the end of their step, and for the client
            self._to_engine.append(metrics.queued_time - sent)
            self._to_wake.append(metrics.first_scheduled_time - metrics.queued_time)
            self._to_client.append(arrived - metrics.first_token_time)


def _processor() -> str:
    """The name of the CPU, as far as the system tells it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:  # noqa: PTH123 - its size is not known
            names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
            return next(names, platform.machine())
    except OSError:
        return platform.machine()
