"""Replays against real engines with the demo model."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
from collections.abc import Iterator

import pytest
from patience import PATIENCE
from replays import KeptRun, replay, request, until

from quire.frontend import LLM, SamplingParams
from quire.frontend.errors import EngineConnectionError
from quire.frontend.evaluation.replay.engine_target import EngineTarget
from quire.frontend.evaluation.replay.load import Load
from quire.frontend.evaluation.replay.record import Outcome, RequestRecord, RunClock
from quire.frontend.evaluation.replay.runner import Replay
from quire.frontend.evaluation.workload.blocks import Prompts
from quire.protocol.routing.routers import RoutingChoice


@pytest.fixture(scope="module")
def target() -> Iterator[EngineTarget]:
    """A target with an engine of little memory."""
    target = EngineTarget.from_options(num_pages=64, max_num_seqs=8, seed=1)
    yield target
    asyncio.run(target.close())


def check_times(record: RequestRecord) -> None:
    """Check that the phases are consecutive from the queue to the end, within the time that the client waited."""
    assert record.first_token is not None
    assert record.last_token is not None
    assert record.arrival <= record.sent <= record.phases[0].begin
    assert all(before.end == after.begin for before, after in itertools.pairwise(record.phases))
    assert record.phases[-1].end <= record.ended
    assert record.last_token <= record.ended
    assert len(record.gaps) < record.output_tokens
    assert sum(record.gaps) == pytest.approx(record.last_token - record.first_token)
    assert record.phases[-1].end - record.phases[0].begin == pytest.approx(sum(p.end - p.begin for p in record.phases))


def test_records_agree_with_the_engine(target: EngineTarget) -> None:
    requests = [request(0.002 * place, prompt=40 + place, output=5 + place, block=place) for place in range(12)]
    kept = asyncio.run(replay(target, requests, Load(warm_up=2)))
    assert kept.outcomes == [Outcome.COMPLETED] * 12
    for wanted, record in zip(requests, kept.in_order, strict=True):
        check_times(record)
        assert [phase.kind for phase in record.phases] == ["queued", "prefill", "decode"]
        assert (record.prompt_tokens, record.output_tokens) == (wanted.prompt_tokens, wanted.output_tokens)
        assert record.arrival == wanted.arrival
        assert record.cached_tokens == 0  # the warm-up has left nothing
    assert kept.samples[-1].pages_total == 64


def test_equal_blocks_are_found_in_the_prefix_cache(target: EngineTarget) -> None:
    requests = [request(prompt=96, session="one", output=2) for _ in range(2)]
    kept = asyncio.run(replay(target, requests, Load(warm_up=1)))
    assert [(record.cached_tokens or 0) >= 64 for record in kept.in_order] == [False, True]
    asyncio.run(target.reset_cache())


def test_engines_fetch_prefixes_from_one_another_as_in_a_live_set(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        target = EngineTarget.from_options(data_parallel_size=2, num_pages=256, max_num_seqs=8, seed=1, threads=1)
        router, clock = target._routing.router, RunClock()

        async def cached_tokens(prompt: list[int], choice: RoutingChoice) -> int | None:
            monkeypatch.setattr(router, "choose", lambda *_: choice)
            record = RequestRecord(0, 0.0, 0.0, 0, 0)
            await target.prepare(request(prompt=len(prompt), output=1), lambda _: prompt)(record, clock)
            assert record.outcome is Outcome.COMPLETED
            return record.cached_tokens

        first, second = router.loads
        try:
            async with asyncio.timeout(PATIENCE):
                for number in itertools.count():  # the first one does not wait for the connection
                    prompt = random.Random(number).choices(range(1000), k=500)
                    assert await cached_tokens(prompt, RoutingChoice(first, "load")) == 0
                    if await cached_tokens(prompt, RoutingChoice(second, "load", 0, first)):
                        return
        finally:
            await target.close()

    asyncio.run(main())


def test_preempted_requests_have_phases_that_add_up(target: EngineTarget) -> None:
    short = [request(prompt=4, output=1, block=100 + place) for place in range(12)]  # which the engine expects then
    asyncio.run(replay(target, short))
    requests = [request(prompt=100, output=300, block=place) for place in range(8)]
    kept = asyncio.run(replay(target, requests))
    assert kept.outcomes == [Outcome.COMPLETED] * 8
    preempted = [record for record in kept.records if record.num_preemptions]
    assert preempted
    for record in kept.records:
        check_times(record)
    kinds = [phase.kind for phase in preempted[0].phases]
    place = kinds.index("preempted")
    assert kinds[place - 1 : place + 3] == ["decode", "preempted", "prefill", "decode"]
    assert kinds.count("preempted") == preempted[0].num_preemptions


def test_requests_that_the_engine_cannot_serve_fail(target: EngineTarget) -> None:
    kept = asyncio.run(replay(target, [request(prompt=5000, block=1), request(params={"top_q": 1}), request()]))
    assert kept.outcomes == [Outcome.ERRORED, Outcome.ERRORED, Outcome.COMPLETED]
    assert "2048" in (kept.in_order[0].error or "")
    assert "top_q" in (kept.in_order[1].error or "")


def test_recorded_parameters_are_used_but_the_length_is_the_workloads(target: EngineTarget) -> None:
    params = {"temperature": 0.7, "seed": 3, "stop": ["a"], "max_tokens": 900, "min_tokens": 800, "n": 4}
    kept = asyncio.run(replay(target, [request(output=9, params=params)]))
    assert [record.output_tokens for record in kept.records] == [9]


def test_text_and_messages_are_sent_as_they_are(target: EngineTarget) -> None:
    kept = asyncio.run(replay(target, [request(text="Once upon a time there was")]))
    assert kept.outcomes == [Outcome.COMPLETED]
    assert 0 < kept.records[0].prompt_tokens < 20


def test_requests_that_time_out_are_ended_in_the_engine(target: EngineTarget) -> None:
    async def main() -> None:
        kept = await replay(target, [request(prompt=1000, output=1000)], Load(request_timeout=0.02))
        assert kept.outcomes == [Outcome.LATE]
        async with asyncio.timeout(PATIENCE):
            while (sample := await target.sample(Replay(target, kept, lambda request: [], Load()).clock)) is None or (
                sample.running or sample.waiting
            ):
                pass

    asyncio.run(main())


def test_refused_requests_are_counted() -> None:
    async def main() -> None:
        target = EngineTarget.from_options(num_pages=64, max_num_seqs=1, max_waiting_requests=2)
        try:
            kept = await replay(target, [request(prompt=30, output=60, block=place) for place in range(16)])
        finally:
            await target.close()
        assert kept.outcomes[0] == Outcome.COMPLETED
        assert {*kept.outcomes} == {Outcome.COMPLETED, Outcome.REFUSED}
        assert all(record.error for record in kept.records if record.outcome is Outcome.REFUSED)

    asyncio.run(main())


def test_a_killed_engine_ends_the_run_with_the_results_so_far() -> None:
    async def main() -> None:
        with LLM(num_pages=64, max_restarts=0) as llm:
            target = EngineTarget.from_options(engine_address=llm.engine_address, reconnect_timeout=0)
            kept = KeptRun()
            run = Replay(target, kept, Prompts(1000).tokens, Load())
            requests = [request(), *(request(0.2, output=1500, block=place) for place in range(1, 9)), request(1e6)]
            running = asyncio.create_task(run.run(requests))
            await until(lambda: len(run.open) == 8 and run.outcomes)
            os.kill(llm._engine.engines.ready.engine_pid, signal.SIGKILL)
            assert "gone" in str(await running)
            await target.close()
        assert kept.outcomes == [Outcome.COMPLETED] + [Outcome.ERRORED] * 8 + [Outcome.UNFINISHED]
        assert kept.interrupted

    asyncio.run(main())


def test_a_missing_engine_is_an_error_before_anything_is_sent() -> None:
    with pytest.raises(EngineConnectionError, match="no engine listens"):
        EngineTarget.from_options(engine_address="ipc:///tmp/no-engine-here")


def test_the_client_generates_the_tokens_of_the_library(target: EngineTarget) -> None:
    """The pages of the sent prompt are in the cache afterwards."""

    async def main() -> None:
        await replay(target, [request(prompt=64, output=8, block=7)])

    asyncio.run(target.reset_cache())
    asyncio.run(main())
    info = target.info
    assert info.vocab_size is not None
    prompt = Prompts(info.vocab_size, avoid=info.special_token_ids).tokens(request(prompt=64, block=7))
    with LLM(engine_address=info.address) as llm:
        (output,) = llm.generate([[*prompt, 5]], SamplingParams(max_tokens=1))
    assert output.num_cached_tokens == 64
