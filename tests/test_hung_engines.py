"""Engines that hang under streams: the others go on with these, and what hangs is let in again once it goes on."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engine_process import EngineUnderTest
from engine_watch import wait_until
from http_server import Server
from patience import PATIENCE
from streamed_answers import Streams, answers, attached, wait_until_at_rest

from quire.frontend import AsyncLLM, RequestOutput, SamplingParams
from quire.frontend.client import engine_set

COUNT, LONG = 6, 600
QUICK = ["--threads", "1", "--heartbeat-seconds", "0.3"]  # ten of which without an answer are too many
TALE = SamplingParams(max_tokens=LONG, ignore_eos=True, temperature=0.9, seed=3, logprobs=1)
PROMPTS = [[300 + number, 17, 23] for number in range(COUNT)]

# Runs in each engine, as its `sitecustomize`: where the flag has its process id, a step waits before it is done.
_HANGING_STEPS = """
import sys
if "quire.engine_core" in sys.orig_argv:
    import os, time
    from pathlib import Path
    from quire.kernels.runner import ModelRunner
    flag, submit = Path({flag!r}) / str(os.getpid()), ModelRunner.submit
    def hanging_submit(runner, step):
        while flag.exists():
            time.sleep(0.001)
        return submit(runner, step)
    ModelRunner.submit = hanging_submit
"""


def cards(server: Server) -> list[dict[str, Any]]:
    """What the server tells of its engines."""
    return list(server.request("/engines").json()["engines"])


def test_streams_of_a_stopped_engine_go_on_in_the_other(demo_model: Path) -> None:
    with EngineUnderTest(demo_model, *QUICK) as one, EngineUnderTest(demo_model, *QUICK) as other:
        addresses = [one.address, other.address]
        with Server.start(*attached(addresses)) as server:
            expected = answers(server, COUNT, LONG)
            assert {(len(answer.tokens), *answer.ends) for answer in expected} == {(LONG, "length", "[DONE]")}
            streams = Streams(server, COUNT, LONG)
            streams.wait_begun(COUNT)
            stopped = max(cards(server), key=lambda card: card["requests"])
            number, pid = stopped["number"], stopped["pid"]
            os.kill(pid, signal.SIGSTOP)
            assert streams.answers() == expected
            wait_until(
                lambda: cards(server)[number]["state"] == "away", "the server did not give up the stopped engine"
            )
            streams = Streams(server, COUNT, LONG)
            streams.wait_begun(COUNT)
            os.kill(pid, signal.SIGCONT)  # it comes back under streams
            assert streams.answers() == expected
            wait_until(lambda: cards(server)[number]["state"] == "ready", "the engine did not come back")
            wait_until_at_rest(addresses)  # of what it had as it was stopped too
            num_routed = sum(cards(server)[number]["routed"].values())
            assert answers(server, COUNT, LONG) == expected
            assert sum(cards(server)[number]["routed"].values()) > num_routed
        wait_until_at_rest(addresses)


async def until(is_so: Callable[[], bool]) -> None:
    """Let others run until it is so."""
    while not is_so():  # noqa: ASYNC110 - other threads make it so
        await asyncio.sleep(0.001)


class Tales:
    """Streams of all prompts."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm
        self.num_begun = 0

    async def run(self) -> list[object]:
        """Return the answers, each of which ends once."""
        return await asyncio.gather(*(self._one(prompt) for prompt in PROMPTS))

    async def _one(self, prompt: list[int]) -> object:
        outputs: list[RequestOutput] = []
        async for output in self._llm.generate({"prompt_token_ids": prompt}, TALE):
            self.num_begun += not outputs
            outputs.append(output)
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
        return outputs[-1].outputs


async def busiest(llm: AsyncLLM) -> int:
    """Return the number of the engine that has the most streams: a router may give all to one."""
    running = {number: stats["running"] for number, stats in (await llm.engine_stats()).items()}
    assert max(running.values()) > 0
    return max(running, key=lambda number: running[number])


async def check_pages(llm: AsyncLLM, count: int) -> None:
    """Wait until so many engines are at rest; nothing is held, and no page is lost."""
    await until(lambda: [engine.state for engine in llm.engines()] == ["ready"] * count)
    while (stats := await llm.stats())["running"] + stats["waiting"] + stats["pages_held"]:
        pass  # each look is a round trip
    for each in (await llm.engine_stats()).values():
        assert each["pages_free"] + each["pages_cached"] == each["pages_total"]


@pytest.fixture
def hanging(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder; engines whose process id has a file there do not step."""
    flags = tmp_path / "hanging"
    flags.mkdir()
    (tmp_path / "sitecustomize.py").write_text(_HANGING_STEPS.format(flag=str(flags)))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    return flags


def test_streams_of_an_engine_whose_step_hangs_go_on_in_the_other(
    demo_model: Path, hanging: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its socket goes on to answer; what it computes at last is left alone."""
    monkeypatch.setattr(engine_set, "_LONGEST_STEP", 3.0)

    async def main() -> None:
        async with AsyncLLM(engine=(one.address, other.address)) as llm, asyncio.timeout(PATIENCE):
            expected = await Tales(llm).run()
            tales = Tales(llm)
            streams = asyncio.create_task(tales.run())
            await until(lambda: tales.num_begun == COUNT)
            number = await busiest(llm)
            flag = hanging / str(llm.engines()[number].ready.engine_pid)
            flag.touch()
            more = Tales(llm).run()  # it may have some of these too
            assert list(await asyncio.gather(streams, more)) == [expected, expected]
            await until(lambda: llm.engines()[number].state == "away")
            tales = Tales(llm)
            streams = asyncio.create_task(tales.run())
            await until(lambda: tales.num_begun == COUNT)
            flag.unlink()
            assert await streams == expected
            await check_pages(llm, 2)
            assert await Tales(llm).run() == expected
            await check_pages(llm, 2)

    with EngineUnderTest(demo_model, *QUICK) as one, EngineUnderTest(demo_model, *QUICK) as other:
        asyncio.run(main())


@pytest.mark.parametrize("form", ["stopped", "step hangs"])
def test_an_own_engine_that_hangs_is_replaced_while_the_other_goes_on(
    demo_model: Path, hanging: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    monkeypatch.setattr(engine_set, "_LONGEST_STEP", 2.0)

    async def main() -> None:
        options: dict[str, Any] = {"num_pages": 256, "threads": 1, "step_timeout": 3.0}
        async with AsyncLLM(str(demo_model), data_parallel_size=2, **options) as llm, asyncio.timeout(PATIENCE):
            expected = await Tales(llm).run()
            before = [engine.ready.engine_pid for engine in llm.engines()]
            tales = Tales(llm)
            streams = asyncio.create_task(tales.run())
            await until(lambda: tales.num_begun == COUNT)
            number = await busiest(llm)
            if form == "stopped":
                os.kill(before[number], signal.SIGSTOP)
            else:
                (hanging / str(before[number])).touch()
            more = Tales(llm).run()  # it may have some of these too
            assert list(await asyncio.gather(streams, more)) == [expected, expected]
            await until(lambda: llm.engines()[number].ready.engine_pid != before[number])
            assert not Path(f"/proc/{before[number]}").exists()  # noqa: ASYNC240
            await check_pages(llm, 2)

    asyncio.run(main())
