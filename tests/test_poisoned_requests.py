"""Requests that kill the engine process: each fails with a clear error, and streams of all clients go on unchanged."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from patience import PATIENCE

from quire.frontend import AsyncLLM, RequestOutput, SamplingParams
from quire.frontend.errors import RequestError

POISON = 1234
DEADLY = 40  # tokens that a poisoned request has when it kills
STREAMS = 6
TALE = SamplingParams(max_tokens=300, ignore_eos=True, temperature=0.9, seed=3)

# Runs in each engine, as its `sitecustomize`: some requests kill it in a step.
_DEADLY = f"""
import sys
if "quire.engine_core" in sys.orig_argv:
    import os, signal
    from quire.engine_core.scheduling.trials import Trials
    begin_step = Trials.begin_step
    def begin(trials, batch):
        begin_step(trials, batch)
        for request in batch.requests:
            if request.prompt_token_ids[0] == {POISON} and request.num_tokens >= {DEADLY}:
                os.kill(os.getpid(), signal.SIGSEGV)
    Trials.begin_step = begin
"""


@pytest.fixture(autouse=True)
def deadly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text(_DEADLY)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


async def last(llm: AsyncLLM, prompt: list[int], params: SamplingParams) -> RequestOutput:
    outputs = [output async for output in llm.generate({"prompt_token_ids": prompt}, params)]
    return outputs[-1]


async def fate(llm: AsyncLLM, prompt: list[int], params: SamplingParams) -> str:
    """Return the error of a request that must fail."""
    with pytest.raises(RequestError) as caught:
        await last(llm, prompt, params)
    return str(caught.value)


def run(demo_model: Path, deadly: list[tuple[list[int], SamplingParams]]) -> int:
    """Run these amid streams of two clients; return how often the engine died, which counts for no limit."""

    async def main() -> int:
        async with (
            AsyncLLM(str(demo_model), num_pages=256, max_restarts=2) as owner,
            AsyncLLM(engine_address=owner.engine_address) as other,
            asyncio.timeout(PATIENCE),
        ):
            prompts = [[300 + number, 17, 23] for number in range(STREAMS)]
            expected = [(await last(owner, prompt, TALE)).outputs for prompt in prompts]
            clients = [owner, other] * (STREAMS // 2)
            streams = [
                asyncio.create_task(last(llm, prompt, TALE)) for llm, prompt in zip(clients, prompts, strict=True)
            ]
            errors = await asyncio.gather(*(fate(other, *each) for each in deadly))
            assert all("the engine has died whenever it worked on this request" in error for error in errors)
            assert [stream.outputs for stream in await asyncio.gather(*streams)] == expected
            stats = await owner.stats()
            assert (stats["pages_held"], stats["pages_free"] + stats["pages_cached"]) == (0, 256)
            return owner.num_engine_losses

    return asyncio.run(main())


def test_a_request_that_kills_each_engine_fails_and_streams_of_other_clients_go_on(demo_model: Path) -> None:
    assert run(demo_model, [([POISON, 5], TALE)]) <= 4


def test_two_at_a_time_that_kill_at_once(demo_model: Path) -> None:
    assert run(demo_model, [([POISON, *range(300, 300 + DEADLY), number], TALE) for number in (5, 6)]) <= 4


def test_a_beam_search_that_kills_each_engine_fails(demo_model: Path) -> None:
    params = SamplingParams(max_tokens=60, beam_width=3, temperature=0.0, ignore_eos=True)
    assert run(demo_model, [([POISON, 5], params)]) <= 2
