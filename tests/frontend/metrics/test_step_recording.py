"""Recordings of a real engine under memory pressure, which agree with statistics and outputs."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import uvloop
from chrome_traces import WrittenTrace
from memory_pressure import expect_short_answers
from patience import PATIENCE

from quire.frontend import LLM, AsyncLLM, RequestOutput, SamplingParams
from quire.frontend.metrics.chrome_trace import ChromeTrace
from quire.frontend.metrics.step_recording import record

if TYPE_CHECKING:
    from conftest import EngineFactory

PROMPTS = ["Once upon a time", "There was a king who", "The fox said to the goose", "Once upon a time", "A dog"]
PARAMS = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)


@pytest.fixture
def llm(engine: EngineFactory, demo_model: Path) -> LLM:
    """An engine in which two answers of 200 tokens do not fit, which is more than it expects."""
    return engine(demo_model, num_pages=12)


async def generate(llm: AsyncLLM, prompt: str) -> RequestOutput:
    return [output async for output in llm.generate(prompt, PARAMS)][-1]


def test_a_recording_agrees_with_the_engine(llm: LLM) -> None:
    expect_short_answers(llm)
    before = llm.stats()["step"]
    outputs: list[RequestOutput] = []
    file = io.BytesIO()

    async def main() -> None:
        async with (
            AsyncLLM(engine_address=llm.engine_address) as watcher,
            AsyncLLM(engine_address=llm.engine_address) as worker,
            asyncio.timeout(PATIENCE),
        ):

            async def work() -> None:
                outputs.extend(await asyncio.gather(*[generate(worker, prompt) for prompt in PROMPTS]))

            with ChromeTrace(file) as chrome:
                await record(watcher, chrome, work)
            assert (chrome.num_requests, chrome.num_dropped) == (len(PROMPTS), 0)

    uvloop.run(main())
    written, stats = WrittenTrace(file.getvalue()), llm.stats()
    written.check()
    assert stats["preemptions"] > 0
    assert len(written.steps) == stats["step"] - before
    assert sum(written.names(number).count("preempted") for number in written.requests) == stats["preemptions"]
    assert sum(output.metrics.num_preemptions for output in outputs) == stats["preemptions"]
    for number in written.requests:
        names = written.names(number)
        assert (names[0], names[-1]) == ("queued", "finished: length")
    needed = sum(len(output.prompt_token_ids) + len(output.outputs[0].token_ids) - 1 for output in outputs)
    found = written.total("cached_tokens", "step")
    assert found == sum(output.num_cached_tokens for output in outputs)
    assert written.total("tokens", "prefill", "decode") == needed - found + stats["wasted_tokens"]


def test_a_cancelled_recording_closes_its_slices(llm: LLM) -> None:
    file = io.BytesIO()

    async def main() -> None:
        async with AsyncLLM(engine_address=llm.engine_address) as watcher, asyncio.timeout(PATIENCE):
            begun = asyncio.Event()

            async def work() -> None:
                params = SamplingParams(max_tokens=1900, ignore_eos=True)
                async for _ in watcher.generate(PROMPTS[0], params):
                    begun.set()

            with ChromeTrace(file) as chrome:
                recording = asyncio.create_task(record(watcher, chrome, work))
                await begun.wait()
                recording.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await recording

    uvloop.run(main())
    written = WrittenTrace(file.getvalue())
    written.check()
    assert written.names(1)[-1] == "finished: abort"


def test_an_error_of_the_work_is_raised(llm: LLM) -> None:
    async def work() -> None:
        raise KeyError("lost")

    async def main() -> None:
        async with AsyncLLM(engine_address=llm.engine_address) as watcher, asyncio.timeout(PATIENCE):
            with ChromeTrace(io.BytesIO()) as chrome:
                await record(watcher, chrome, work)

    with pytest.raises(KeyError, match="lost"):
        uvloop.run(main())
