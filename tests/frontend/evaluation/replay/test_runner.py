"""Sending and counting of requests, with a fake target."""

from __future__ import annotations

import asyncio
import io
import itertools
import re
import time
from collections.abc import Iterator

import pytest
from replays import KeptRun, replay, request, until
from rich.console import Console

from quire.frontend.evaluation.replay.load import Load
from quire.frontend.evaluation.replay.progress import bar, progress_line
from quire.frontend.evaluation.replay.record import Outcome, RequestRecord, RunClock, TargetSample
from quire.frontend.evaluation.replay.runner import Replay
from quire.frontend.evaluation.replay.target import Send, TargetInfo, Tokens
from quire.frontend.evaluation.workload.request import WorkloadRequest


class FakeTarget:
    """A target that ends a request after `turns` of the event loop, or never if None."""

    def __init__(self, turns: int | None = 3) -> None:
        self.info = TargetInfo("fake", "none", "nowhere", 100, 50)
        self.in_flight: list[int] = []
        self.most = 0
        self.prompts: list[list[int]] = []
        self.dead: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.caches_emptied = 0
        self._turns = turns

    def prepare(self, request: WorkloadRequest, tokens: Tokens) -> Send:
        if request.params is not None:
            raise ValueError("no parameters here")
        prompt = tokens(request)

        async def send(record: RequestRecord, clock: RunClock) -> None:
            self.prompts.append(prompt)
            self.in_flight.append(record.index)
            self.most = max(self.most, len(self.in_flight))
            try:
                await self._serve(record, clock)
            finally:
                self.in_flight.remove(record.index)

        return send

    async def _serve(self, record: RequestRecord, clock: RunClock) -> None:
        if self._turns is None:
            await asyncio.Event().wait()
        for _ in range(self._turns or 0):
            await asyncio.sleep(0)
        record.outcome, record.first_token = Outcome.COMPLETED, clock.now()

    async def sample(self, clock: RunClock) -> TargetSample | None:
        return TargetSample(clock.now(), running=len(self.in_flight))

    async def reset_cache(self) -> bool:
        self.caches_emptied += 1
        return True

    async def wait_dead(self) -> str:
        return await self.dead

    async def close(self) -> None:
        pass


class BlockingTarget(FakeTarget):
    """A target whose client blocks the event loop for a while."""

    async def _serve(self, record: RequestRecord, clock: RunClock) -> None:
        await super()._serve(record, clock)
        time.sleep(0.05)  # noqa: ASYNC251 - a client with too much to do


def test_an_open_loop_sends_at_the_workloads_times_regardless_of_running_requests() -> None:
    async def main() -> None:
        target = FakeTarget(turns=None)
        kept = KeptRun()
        run = Replay(target, kept, lambda request: [1], Load())
        running = asyncio.create_task(run.run([request(0.0), request(0.01), request(0.03)]))
        await until(lambda: len(target.in_flight) == 3)
        run.stop("enough")
        assert await running == kept.interrupted == "enough"
        assert [record.arrival for record in kept.in_order] == [0.0, 0.01, 0.03]
        assert all(record.lag >= 0 for record in kept.records)
        assert kept.samples
        assert kept.outcomes == [Outcome.UNFINISHED] * 3

    asyncio.run(main())


def test_requests_that_are_due_at_once_are_sent_in_order() -> None:
    async def main() -> None:
        kept = await replay(FakeTarget(), [request() for _ in range(1000)])
        sent = [record.sent for record in kept.in_order]
        assert len(sent) == 1000
        assert sent == sorted(sent)
        assert {*kept.outcomes} == {Outcome.COMPLETED}
        assert kept.interrupted is None

    asyncio.run(main())


def test_a_closed_loop_keeps_its_users_busy_and_is_never_late_by_the_workloads_times() -> None:
    async def main() -> None:
        target = FakeTarget()
        kept = await replay(target, [request(arrival=1e6) for _ in range(20)], Load(concurrency=3))
        assert target.most == 3
        assert kept.outcomes == [Outcome.COMPLETED] * 20
        assert all(record.arrival <= record.sent for record in kept.records)
        assert kept.in_order[0].arrival < 1e6

    asyncio.run(main())


def test_a_cap_holds_back_an_open_loop_and_the_wait_counts_as_lag() -> None:
    async def main() -> None:
        target = BlockingTarget()
        kept = await replay(target, [request() for _ in range(3)], Load(max_concurrency=1))
        assert target.most == 1
        assert [round(record.lag / 0.05) >= place for place, record in enumerate(kept.in_order)] == [True] * 3

    asyncio.run(main())


def test_a_slow_client_shows_in_the_lag() -> None:
    async def main() -> None:
        kept = await replay(BlockingTarget(turns=0), [request(0.001 * place) for place in range(16)])
        assert max(record.lag for record in kept.records) > 0.5

    asyncio.run(main())


def test_a_turn_waits_for_the_previous_one_without_lag() -> None:
    async def main() -> None:
        turns = [request(0.0, session="a"), request(0.0, session="a", delay=0.02), request(0.0, session="a")]
        first, second, third = (await replay(FakeTarget(), [*turns, request(0.0)])).in_order[:3]
        assert first.ended + 0.02 <= second.arrival <= second.sent
        assert third.arrival >= second.ended
        assert third.arrival <= third.sent

    asyncio.run(main())


def test_a_turn_that_comes_late_enough_keeps_its_own_time() -> None:
    async def main() -> None:
        kept = await replay(FakeTarget(), [request(0.0, session="a"), request(0.05, session="a", delay=1e-6)])
        assert 0.05 <= kept.in_order[1].arrival <= kept.in_order[1].sent  # more than 0.05 if the first ended later

    asyncio.run(main())


def test_users_of_a_closed_loop_wait_for_turns_without_blocking_each_other() -> None:
    async def main() -> None:
        requests = [request(session=f"{place % 2}") for place in range(12)]
        kept = await replay(FakeTarget(), requests, Load(concurrency=4))
        for session in (0, 1):
            turns = kept.in_order[session::2]
            assert all(after.sent >= before.ended for before, after in itertools.pairwise(turns))

    asyncio.run(main())


def test_a_warm_up_has_other_tokens_and_is_marked() -> None:
    async def main() -> None:
        target = FakeTarget()
        kept = await replay(target, [request(block=place) for place in range(5)], Load(warm_up=2))
        assert [record.is_warm_up for record in kept.records].count(True) == 2
        assert len(kept.in_order) == 5
        assert target.caches_emptied == 1
        warm, measured = target.prompts[:2], target.prompts[2:]
        assert all(prompt not in measured for prompt in warm)

    asyncio.run(main())


def test_a_target_that_dies_in_the_warm_up_leaves_all_unfinished() -> None:
    async def main() -> None:
        target, kept = FakeTarget(turns=None), KeptRun()
        running = asyncio.create_task(Replay(target, kept, lambda request: [1], Load(warm_up=1)).run([request()] * 3))
        await until(lambda: target.in_flight)
        target.dead.set_result("it fell over")
        assert await running == kept.interrupted == "it fell over"
        assert kept.outcomes == [Outcome.UNFINISHED] * 3
        assert kept.seconds == 0.0

    asyncio.run(main())


def test_a_request_that_exceeds_its_timeout_is_late() -> None:
    async def main() -> None:
        target = FakeTarget(turns=None)
        kept = await replay(target, [request(), request()], Load(request_timeout=0.01))
        assert kept.outcomes == [Outcome.LATE] * 2
        assert "0.01 s" in (kept.in_order[0].error or "")
        assert not target.in_flight

    asyncio.run(main())


def test_a_warm_up_that_exceeds_the_timeout_is_ended_and_reported() -> None:
    async def main() -> None:
        target, kept = FakeTarget(turns=None), KeptRun()
        run = Replay(target, kept, lambda request: [1], Load(request_timeout=0.01, warm_up=2))
        assert await run.run([request(), request()]) is None
        warm = [record for record in kept.records if record.is_warm_up]
        assert run.cold == warm
        assert [record.outcome for record in warm] == [Outcome.LATE] * 2
        assert target.caches_emptied == 1

    asyncio.run(main())


def test_a_request_that_cannot_be_prepared_fails() -> None:
    async def main() -> None:
        kept = await replay(FakeTarget(), [request(), request(params={"top_k": 1})])
        assert kept.outcomes == [Outcome.COMPLETED, Outcome.ERRORED]
        assert kept.in_order[1].error == "no parameters here"

    asyncio.run(main())


@pytest.mark.parametrize("load", [Load(), Load(concurrency=2), Load(max_concurrency=2)])
def test_a_dead_target_fails_requests_in_flight_and_leaves_the_rest_unfinished(load: Load) -> None:
    async def main() -> None:
        target = FakeTarget(turns=None)
        kept = KeptRun()
        run = Replay(target, kept, lambda request: [1], load)
        requests = [request(), request(), request(5.0, session="a"), *(request(1e6) for _ in range(997))]
        running = asyncio.create_task(run.run(requests))
        await until(lambda: len(target.in_flight) == 2)
        target.dead.set_result("it fell over")
        assert await running == kept.interrupted == "it fell over"
        assert kept.outcomes == [Outcome.ERRORED] * 2 + [Outcome.UNFINISHED] * 998
        assert [record.index for record in kept.in_order] == [*range(1000)]
        assert [record.was_sent for record in kept.in_order] == [True] * 2 + [False] * 998
        assert kept.in_order[0].error == "it fell over"

    asyncio.run(main())


def test_a_broken_trace_lets_requests_in_flight_end() -> None:
    def broken() -> Iterator[WorkloadRequest]:
        yield from (request(), request())
        raise ValueError("trace:3: rubbish")

    async def main() -> None:
        kept = KeptRun()
        with pytest.raises(ValueError, match="trace:3"):
            await Replay(FakeTarget(), kept, lambda request: [1], Load()).run(broken())
        assert kept.outcomes == [Outcome.COMPLETED] * 2
        assert kept.interrupted == "trace:3: rubbish"
        assert kept.seconds is not None

    asyncio.run(main())


def test_the_duration_of_a_run_ends_with_its_measurement() -> None:
    counted: list[float] = []

    async def main() -> None:
        target, kept = FakeTarget(turns=None), KeptRun()
        run = Replay(target, kept, lambda request: [1], Load())

        def requests() -> Iterator[WorkloadRequest]:
            yield request()
            yield from (request(1e6) for _ in range(5000))  # more than are prefetched
            counted.append(run.clock.now())

        running = asyncio.create_task(run.run(requests()))
        await until(lambda: target.in_flight)
        run.stop("enough")
        await running
        assert kept.seconds is not None
        assert 0 < kept.in_order[0].ended <= kept.seconds < counted[0]

    asyncio.run(main())


def test_an_uncounted_rest_is_reported() -> None:
    def requests() -> Iterator[WorkloadRequest]:
        yield request()
        yield from (request(1e6) for _ in range(5000))  # more than are prefetched
        raise ValueError("trace:5002: rubbish")

    async def main() -> None:
        target, kept = FakeTarget(turns=None), KeptRun()
        run = Replay(target, kept, lambda request: [1], Load())
        running = asyncio.create_task(run.run(requests()))
        await until(lambda: target.in_flight)
        run.stop("enough")
        await running
        assert kept.interrupted == "enough; the rest of the workload is not counted as unfinished: trace:5002: rubbish"
        assert kept.outcomes == [Outcome.UNFINISHED] * 5001

    asyncio.run(main())


def test_a_defect_ends_the_run_with_the_measurements_so_far() -> None:
    class Broken(FakeTarget):
        async def _serve(self, record: RequestRecord, clock: RunClock) -> None:
            await super()._serve(record, clock)
            if record.index == 2:
                raise KeyError("a defect")

    async def main() -> None:
        for load in (Load(), Load(concurrency=1)):
            kept = KeptRun()
            with pytest.raises(KeyError, match="a defect"):
                await Replay(Broken(), kept, lambda request: [1], load).run([request() for _ in range(3)])
            assert kept.outcomes[:2] == [Outcome.COMPLETED] * 2
            assert len(kept.records) == 3
            assert kept.interrupted == "KeyError: 'a defect'"

    asyncio.run(main())


def test_short_answers_are_counted() -> None:
    async def main() -> None:
        run = Replay(FakeTarget(), KeptRun(), lambda request: [1], Load())
        await run.run([request(output=1), request(output=0)])
        assert run.num_short == 1

    asyncio.run(main())


def test_a_long_workload_is_read_gradually() -> None:
    read, is_wanted = 0, True

    def endless() -> Iterator[WorkloadRequest]:
        nonlocal read
        while is_wanted:
            read += 1
            yield request(1e6)

    async def main() -> None:
        target, kept = FakeTarget(), KeptRun()
        run = Replay(target, kept, lambda request: [1], Load())
        running = asyncio.create_task(run.run(endless()))
        await until(lambda: run.has_begun)
        assert read < 5000
        nonlocal is_wanted
        is_wanted = False
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(main())


def test_progress_shows_counts_and_recent_latency() -> None:
    async def main() -> None:
        target, kept = FakeTarget(turns=None), KeptRun()
        run = Replay(target, kept, lambda request: [1], Load(request_timeout=0.01))
        assert (progress_line(run), run.share) == ("warming up", None)
        running = asyncio.create_task(run.run([request(), request(1e6)]))
        await until(lambda: run.open)
        run.open[0].first_token = run.open[0].last_token = run.clock.now()
        assert re.fullmatch(r"\d+ s: 1 sent, 1 in flight, 0 ended, TTFT \S+ ms, lag \S+ ms", progress_line(run))
        assert run.share == 0
        await until(lambda: run.outcomes)
        assert 0 < run.share <= run.clock.now() / 1e6
        assert re.match(r"\d+ s: 1 sent, 0 in flight, 1 ended, 1 late, TTFT", progress_line(run))
        run.stop("enough")
        await running

    asyncio.run(main())


def test_the_bar_shows_the_share_and_pulses_if_it_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(share: float | None) -> str:
        monkeypatch.setattr(Replay, "share", share)
        out = io.StringIO()
        with bar(
            Replay(FakeTarget(), KeptRun(), lambda request: [1], Load()),
            Console(file=out, force_terminal=True, no_color=True, width=100),
        ) as show:
            show()
        return out.getvalue()

    assert re.search(r"━{10}[╸╺ ]{10} -+:-+ warming up", asyncio.run(main(0.5)))
    pulsing = asyncio.run(main(None))
    assert re.search(r"[━ ]{20} +warming up", pulsing)
    assert "━" in pulsing
