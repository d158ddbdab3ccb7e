"""Calibration of an engine: serves scenes and fits the time of its steps."""

from __future__ import annotations

import asyncio
import itertools
import platform
import random
import time
from bisect import bisect_left
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import NamedTuple

from quire.frontend.evaluation.calibration.client_times import ClientTimes
from quire.frontend.evaluation.calibration.fetches import FetchError, measure_fetches
from quire.frontend.evaluation.calibration.fit import StepTimes, fit
from quire.frontend.evaluation.calibration.scenes import RequestSize, Scene, families
from quire.frontend.evaluation.calibration.trust import Evidence
from quire.frontend.evaluation.replay.engine_target import EngineTarget
from quire.frontend.evaluation.replay.host import processor
from quire.frontend.evaluation.replay.interference import StealTime
from quire.frontend.evaluation.replay.record import Outcome, RequestRecord, RunClock
from quire.frontend.evaluation.replay.target import Send
from quire.frontend.evaluation.workload.request import WorkloadRequest
from quire.protocol.engine_shape import EngineShape
from quire.protocol.messages import StepTrace
from quire.protocol.simulation import Calibration, FetchTime

Report = Callable[[str], None]

_MOST_FETCHED = 4096  # tokens


async def calibrate(target: EngineTarget, seconds: float, report: Report = lambda _: None) -> Calibration:
    """Serve scenes for `seconds` and fit the step times; `report` gets a line for each scene. The engine must be idle.

    The calibration's `doubts` say why it cannot be trusted; there are none where it can.

    Raises ValueError if the engine is busy, does not report its limits or ends no request in that time, RuntimeError
    when it fails.
    """
    info, client = target.info, target.engines
    shape = client.ready.shape
    if shape is None:
        raise ValueError(f"the engine at {info.address} does not report its limits; start one of this version")
    stats = await asyncio.wrap_future(client.call("stats"))
    if stats["running"] or stats["waiting"]:
        raise ValueError(f"the engine at {info.address} is serving other requests; calibrate an idle one")
    stage = _Stage(target)
    steal = StealTime()
    async with _traced(target) as traces:
        await stage.play_all(families(shape), seconds, report)
    fetch = await _fetch_time(target, stage, shape, report)
    steps = StepTimes.of(stage.of_plays(traces))
    step_time, error = fit(steps)
    evidence = Evidence.of(steps, step_time, steal.share)
    return Calibration(
        model=info.model,
        host=f"{platform.node()}, {processor()}",
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        engine=shape,
        step=step_time,
        client=stage.client_times.medians,
        fetch=fetch,
        steps=len(steps.seconds),
        error=error,
        held_out_error=evidence.error,
        noise=evidence.noise,
        doubts=tuple(evidence.doubts),
    )


async def _fetch_time(target: EngineTarget, stage: _Stage, shape: EngineShape, report: Report) -> FetchTime:
    """Return the times of fetches from the engine, assumed ones if it lets nobody fetch."""
    size = min(shape.max_model_len - 1, shape.pool_tokens // 2, _MOST_FETCHED)
    if not shape.enable_prefix_caching or size <= shape.block_size:
        return FetchTime()
    prompt = await stage.serve_prompt(size)
    try:
        found = await asyncio.to_thread(measure_fetches, target.engines.address, target.security, shape, prompt)
    except FetchError as error:
        report(f"the times in which engines fetch prefixes are assumed ones, since none were measured: {error}")
        return FetchTime()
    report(f"fetches of {size} tokens: {(found.answer + size * found.token) * 1e3:.1f} ms")
    return found


@asynccontextmanager
async def _traced(target: EngineTarget) -> AsyncIterator[list[StepTrace]]:
    """Yield a list that gets the traces of the engine's steps, and is complete at the end."""
    traces: list[StepTrace] = []
    is_last = asyncio.Event()
    loop = asyncio.get_running_loop()

    def take(trace: StepTrace) -> None:
        traces.append(trace)
        if trace.last:
            loop.call_soon_threadsafe(is_last.set)

    await asyncio.wrap_future(target.engines.start_trace(take))
    try:
        yield traces
    finally:
        await asyncio.wrap_future(target.engines.stop_trace())
    await is_last.wait()


class _Play(NamedTuple):
    """Serving of a scene from `begin` to `end`; `again` if it was not the first time."""

    begin: float
    end: float
    again: bool


class _Stage:
    """Serves scenes on an engine, and records the transit times of its requests and their tokens."""

    def __init__(self, target: EngineTarget) -> None:
        self._target = target
        self._clock = RunClock()
        self._random = random.Random(0)
        self._plays: list[_Play] = []
        self._played: set[str] = set()
        self.client_times = ClientTimes()

    async def play_all(self, families: list[list[Scene]], seconds: float, report: Report) -> None:
        """Play all scenes repeatedly, for `seconds`.

        A scene that takes too long is cut off and not played again, except the cheapest one of a family.
        """
        begun = time.monotonic()
        for rounds in itertools.count():
            for number, family in enumerate(families, 1):
                share = 1.0 if rounds else number / len(families)  # in the first round each must get its time
                await self._play_family(family, begun + share * seconds, report)
            if time.monotonic() >= begun + seconds:
                return

    async def _play_family(self, family: list[Scene], deadline: float, report: Report) -> None:
        for number, scene in enumerate(family):
            begun = time.monotonic()
            if begun >= deadline:
                return
            is_whole = await self._play(scene, deadline)
            took = time.monotonic() - begun
            if not scene.rest:  # the steps after a rest are not typical
                self._plays.append(_Play(begun, begun + took, scene.name in self._played))
            self._played.add(scene.name)
            report(f"{scene.name}: {took:.2f} s{'' if is_whole else ', cut off'}")
            if not is_whole:
                del family[max(number, 1) :]
                return

    def of_plays(self, traces: list[StepTrace]) -> list[list[StepTrace]]:
        """Return the steps of each play, without the first play of a scene if there are more: engines warm up."""
        plays = [play for play in self._plays if play.again] or self._plays
        begins = [trace.begin for trace in traces]
        return [traces[bisect_left(begins, play.begin) : bisect_left(begins, play.end)] for play in plays]

    async def _play(self, scene: Scene, deadline: float) -> bool:
        """Serve all requests of the scene; return False if some were aborted at the deadline."""
        sends = iter([self._prepare(size) for size in scene.requests])
        records: list[RequestRecord] = []
        try:
            async with asyncio.timeout(deadline - time.monotonic()), asyncio.TaskGroup() as group:
                for _ in range(scene.concurrency):
                    group.create_task(self._serve(scene, sends, records))
        except TimeoutError:
            return False
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        if scene.concurrency > 1:
            self.client_times.add_burst(records[: scene.concurrency])
        elif scene.rest is not None:
            self.client_times.add_rested(records, scene.rest)
        return True

    async def serve_prompt(self, num_tokens: int) -> list[int]:
        """Let the engine compute a prompt of so many tokens, and return it."""
        prompt = self._prompt(num_tokens)
        send = self._target.prepare(WorkloadRequest(0.0, num_tokens, 1, ()), lambda _: prompt)
        now = self._clock.now()
        await send(RequestRecord(0, now, now, 0, 0), self._clock)
        return prompt

    def _prompt(self, num_tokens: int) -> list[int]:
        return self._random.choices(range(self._target.engines.ready.vocab_size), k=num_tokens)

    def _prepare(self, size: RequestSize) -> Send:
        prompt = self._prompt(size.prompt_tokens)
        request = WorkloadRequest(0.0, size.prompt_tokens, size.output_tokens, ())
        return self._target.prepare(request, lambda _: prompt)

    async def _serve(self, scene: Scene, sends: Iterator[Send], records: list[RequestRecord]) -> None:
        """Send requests one by one, as one of the scene's concurrent senders; each adds its record when it is sent."""
        for send in sends:
            if scene.rest:
                await asyncio.sleep(scene.rest)
            now = self._clock.now()
            record = RequestRecord(0, now, now, 0, 0)
            records.append(record)
            await send(record, self._clock)
            if record.outcome is not Outcome.COMPLETED:
                raise RuntimeError(f"a request of the calibration {record.outcome}: {record.error}")
            if scene.concurrency == 1 and scene.rest is None:
                self.client_times.add(record)
