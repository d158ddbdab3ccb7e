"""Several engines behind one client: nothing is lost as they come, go and die, and answers are those of one engine."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from patience import PATIENCE
from quire_command import quire_command

from quire.frontend import LLM, AsyncLLM, EngineConnectionError, EngineStartError, RequestOutput, SamplingParams
from quire.frontend.errors import RequestError
from quire.frontend.text.prompts import PromptType
from quire.protocol.routing.routers import PrefixAffinity

OPTIONS: dict[str, Any] = {"num_pages": 256, "threads": 1}
TALE = SamplingParams(max_tokens=200, ignore_eos=True, temperature=0.9, seed=3, logprobs=1)
PROMPTS = [[300 + number, 17, 23] for number in range(8)]


async def last(llm: AsyncLLM, prompt: list[int], params: SamplingParams = TALE) -> RequestOutput:
    outputs = [output async for output in llm.generate({"prompt_token_ids": prompt}, params)]
    return outputs[-1]


async def answers(llm: AsyncLLM) -> list[object]:
    """Stream all prompts together."""
    return [output.outputs for output in await asyncio.gather(*(last(llm, prompt) for prompt in PROMPTS))]


async def until(is_so: Callable[[], bool]) -> None:
    """Let others run until it is so."""
    while not is_so():  # noqa: ASYNC110 - other threads make it so
        await asyncio.sleep(0.001)


async def check_pages(llm: AsyncLLM) -> None:
    """Nothing is held, and no page is lost, in each engine."""
    for stats in (await llm.engine_stats()).values():
        assert (stats["pages_held"], stats["pages_free"] + stats["pages_cached"]) == (0, stats["pages_total"])


@pytest.fixture(scope="module")
def expected(demo_model: Path) -> list[object]:
    """The answers of one engine."""
    with LLM(str(demo_model), **OPTIONS) as llm:
        prompts: list[PromptType] = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        return [output.outputs for output in llm.generate(prompts, TALE)]


@pytest.fixture
def second(demo_model: Path) -> Iterator[LLM]:
    """An engine that runs, of which others have the address."""
    with LLM(str(demo_model), **OPTIONS) as llm:
        yield llm


def run(test: object) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(PATIENCE):
            await test  # type: ignore[misc]

    asyncio.run(bounded())


def test_streams_go_on_when_each_engine_is_killed(demo_model: Path, expected: list[object]) -> None:
    async def main() -> None:
        async with AsyncLLM(str(demo_model), data_parallel_size=2, **OPTIONS) as llm:
            assert [(engine.number, engine.state, engine.supervised) for engine in llm.engines()] == [
                (0, "ready", True), (1, "ready", True),
            ]  # fmt: skip
            assert await answers(llm) == expected
            assert {engine for engine, _ in llm.routed()} == {"0", "1"}
            for victim in (0, 1):
                streams = asyncio.create_task(answers(llm))
                pid = llm.engines()[victim].ready.engine_pid
                await asyncio.sleep(0)
                os.kill(pid, signal.SIGKILL)
                assert await streams == expected
                await until(lambda: [engine.state for engine in llm.engines()] == ["ready", "ready"])
            assert [engine.num_losses for engine in llm.engines()] == [1, 1]
            assert llm.num_engine_losses == 2
            await llm.check_health()
            await check_pages(llm)

    run(main())


def test_engines_join_drain_and_leave_under_streams(demo_model: Path, second: LLM, expected: list[object]) -> None:
    async def main() -> None:
        async with AsyncLLM(str(demo_model), router="round-robin", **OPTIONS) as llm:
            streams = asyncio.create_task(answers(llm))
            assert await llm.add_engine(second.engine_address) == 1
            assert await streams == expected
            streams = asyncio.create_task(answers(llm))
            await until(lambda: llm.num_requests()[1] > 0)
            await llm.remove_engine(1, drain_timeout=0.0)  # what it has moves
            assert llm.num_requests()[1] == 0
            assert await streams == expected
            assert [engine.number for engine in llm.engines()] == [0]
            assert await llm.add_engine(second.engine_address) == 2  # a number is given once
            await llm.drain_engine(0)
            assert [engine.state for engine in llm.engines()] == ["draining", "ready"]
            assert {output.metrics.engine for output in [await last(llm, prompt) for prompt in PROMPTS[:2]]} == {2}
            pid = llm.engines()[0].ready.engine_pid
            await llm.remove_engine(0)  # it was started here, and ends
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)
            assert await answers(llm) == expected
            await check_pages(llm)

    run(main())
    assert second.stats()["clients"] == 1  # its owner


def test_what_cannot_join_or_leave_is_refused(demo_model: Path, second: LLM) -> None:
    async def main() -> None:
        async with AsyncLLM(engine_address=second.engine_address) as llm:
            with pytest.raises(EngineConnectionError, match="is in use already; give another one"):
                await llm.add_engine(second.engine_address)
            with pytest.raises(EngineConnectionError, match="no engine listens at"):
                await llm.add_engine("ipc:///tmp/quire-nobody.sock")
            with pytest.raises(ValueError, match="must start with ipc:// or tcp://"):
                await llm.add_engine("http://localhost:1")
            with pytest.raises(ValueError, match="engine 0 is the last one that takes requests"):
                await llm.remove_engine(0)
            with pytest.raises(ValueError, match="there is no engine 7; the engines are 0"):
                await llm.drain_engine(7)
            with (
                LLM(str(demo_model), max_model_len=128, **OPTIONS) as other,
                pytest.raises(EngineConnectionError, match=r"has max_model_len 128, and the one at .* 2048"),
            ):
                await llm.add_engine(other.engine_address)
            assert (await last(llm, PROMPTS[0])).finished

    run(main())


def test_an_engine_that_is_stopped_hands_its_requests_over(
    demo_model: Path, second: LLM, expected: list[object]
) -> None:
    async def main() -> None:
        async with AsyncLLM(str(demo_model), engine=(second.engine_address,), data_parallel_size=2, **OPTIONS) as llm:
            assert len(llm.engines()) == 3
            streams = asyncio.create_task(answers(llm))
            await until(lambda: llm.num_requests()[2] > 0)
            await asyncio.to_thread(second.close)  # its owner ends it
            assert await streams == expected
            await until(lambda: len(llm.engines()) == 2)
            await check_pages(llm)

    run(main())


def test_a_sync_client_has_several_engines_too(demo_model: Path, expected: list[object]) -> None:
    with LLM(str(demo_model), data_parallel_size=2, **OPTIONS) as llm:
        prompts: list[PromptType] = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        outputs = llm.generate(prompts, TALE)
        assert [output.outputs for output in outputs] == expected
        assert {output.metrics.engine for output in outputs} == {0, 1}
        assert llm.stats()["pages_total"] == 512
        assert llm.pin_prefix({"prompt_token_ids": list(range(300, 400))}) == 96
        assert llm.stats()["pages_held"] == 3
        assert llm.unpin_prefix({"prompt_token_ids": list(range(300, 400))})
        assert llm.reset_prefix_cache()
        assert llm.stats()["pages_free"] == 512


def test_a_request_that_kills_engines_does_not_kill_all(
    demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expected: list[object]
) -> None:
    poison = 1234
    (tmp_path / "sitecustomize.py").write_text(f"""
import sys
if "quire.engine_core" in sys.orig_argv:
    import os, signal
    from quire.engine_core.scheduling.trials import Trials
    begin_step = Trials.begin_step
    def begin(trials, batch):
        begin_step(trials, batch)
        if any(request.prompt_token_ids[0] == {poison} for request in batch.requests):
            os.kill(os.getpid(), signal.SIGSEGV)
    Trials.begin_step = begin
""")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")

    async def main() -> None:
        async with AsyncLLM(str(demo_model), data_parallel_size=3, **OPTIONS) as llm:
            streams = asyncio.create_task(answers(llm))
            with pytest.raises(RequestError, match="the engine has died whenever it worked on this request"):
                await last(llm, [poison, 5])
            assert await streams == expected
            losses = [engine.num_losses for engine in llm.engines()]
            assert 0 in losses
            assert sum(losses) <= 4
            await check_pages(llm)

    run(main())


def test_more_engines_than_cores_need_threads(demo_model: Path) -> None:
    count = 1 + (os.cpu_count() or 1)
    with pytest.raises(EngineStartError, match=f"data_parallel_size={count} needs as many cores, .* set threads"):
        LLM(str(demo_model), data_parallel_size=count, num_pages=64)


def test_the_command_runs_several_engines(demo_model: Path, tmp_path: Path, expected: list[object]) -> None:
    path = tmp_path / "engine.sock"
    flags = ["--engine-address", f"ipc://{path}", "--data-parallel-size", "2", "--threads", "1", "--num-pages", "256"]
    process = subprocess.Popen(quire_command("engine", *flags), stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        ready = sorted(process.stdout.readline().split()[1] for _ in range(2))
        assert ready == [f"ipc://{path}", f"ipc://{path}.1"]

        async def main() -> None:
            async with AsyncLLM(engine_address=ready[0], engine=tuple(ready[1:])) as llm:
                assert await answers(llm) == expected
                await check_pages(llm)

        run(main())
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) == 130
    assert not list(tmp_path.glob("*.sock*"))


def weights_of(pid: int) -> int:
    """Return the number of the file in which a process has its weights."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return next(int(line.split()[4]) for line in lines if "quire-weights" in line)


def test_engines_have_one_copy_of_the_weights_and_are_reloaded_in_turn(
    demo_model: Path, expected: list[object]
) -> None:
    async def main() -> None:
        async with AsyncLLM(str(demo_model), data_parallel_size=2, **OPTIONS) as llm:
            before = {weights_of(engine.ready.engine_pid) for engine in llm.engines()}
            assert len(before) == 1
            streams = asyncio.create_task(answers(llm))
            await until(lambda: llm.num_requests()[0] > 0)
            await llm.reload(max_num_seqs=33)
            assert await streams == expected
            assert [engine.ready.max_num_seqs for engine in llm.engines()] == [33, 33]
            assert {weights_of(engine.ready.engine_pid) for engine in llm.engines()} == before
            assert llm.num_engine_losses == 0
            await llm.reload(quantization="int8")
            after = {weights_of(engine.ready.engine_pid) for engine in llm.engines()}
            assert len(after) == 1
            assert after != before
            await check_pages(llm)

    run(main())


def test_a_prompt_goes_where_its_prefix_is(demo_model: Path) -> None:
    """Engines tell the router what they have, by salt, also what others have had computed."""

    async def main() -> None:
        async with AsyncLLM(str(demo_model), data_parallel_size=2, **OPTIONS) as llm:
            short = SamplingParams(max_tokens=2, temperature=0.0)

            async def sent(prompt: list[int], salt: str = "") -> tuple[int | None, str, int]:
                async for output in llm.generate({"prompt_token_ids": prompt}, short, cache_salt=salt):
                    last = output
                return last.metrics.engine, last.metrics.routing, last.num_cached_tokens

            tales = [[300 + number, *range(20, 180)] for number in range(4)]
            homes = [(await sent(tale))[0] for tale in tales]
            assert set(homes) == {0, 1}
            router = llm._engine.routing.router
            assert isinstance(router, PrefixAffinity)
            outline = router.outline

            def found(prompt: list[int], salt: str = "") -> dict[int, int]:
                return outline.match(outline.prefixes(salt, prompt))

            for tale, home in zip(tales, homes, strict=True):
                await until(lambda: found(tale).get(home or 0) == 160)  # noqa: B023
                assert await sent([*tale, 7]) == (home, "prefix", 160)
            assert (await sent(tales[0], "a salt"))[1:] == ("load", 0)
            await until(lambda: 160 in found(tales[0], "a salt").values())
            _, reason, cached = await sent(tales[0], "a salt")
            assert (reason, cached) == ("prefix", 160)

            with LLM(engine_address=llm.engines()[1].address) as other:
                prompt = [500, *range(20, 180)]
                other.generate({"prompt_token_ids": prompt}, short)
            await until(lambda: found(prompt).get(1) == 160)
            assert await sent([*prompt, 7]) == (1, "prefix", 160)

    run(main())


def test_a_prefix_that_another_engine_has_is_fetched(demo_model: Path) -> None:
    rest = [10 + 7 * i % 2000 for i in range(399)]
    num_pages = 400 // 32

    async def main() -> None:
        async with AsyncLLM(str(demo_model), data_parallel_size=2, router="prefix-affinity", **OPTIONS) as llm:
            router = llm._engine.routing.router
            assert isinstance(router, PrefixAffinity)
            for number in itertools.count():  # until the engines are connected, and a busy host fetches in time
                prompt, num_known = [500 + number, *rest], len(router.outline)
                expected = await last(llm, prompt)
                home = expected.metrics.engine
                assert home is not None
                await until(lambda num_known=num_known: len(router.outline) >= num_known + num_pages)  # type: ignore[misc]
                await llm.drain_engine(home)
                again = await last(llm, prompt)
                assert (again.metrics.engine, again.outputs) == (1 - home, expected.outputs)
                await check_pages(llm)
                if again.num_cached_tokens == num_pages * 32:
                    stats = await llm.engine_stats()
                    assert stats[1 - home]["kv_peer_pages_fetched"] >= num_pages
                    assert stats[home]["kv_peer_pages_served"] >= num_pages
                    return
                llm._engine.set_draining(home, is_draining=False)

    run(main())
