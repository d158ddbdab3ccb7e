"""A client that is kept from running Python: an extension module that holds the interpreter's lock, for instance."""

from __future__ import annotations

import asyncio
import ctypes
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.frontend import AsyncLLM, SamplingParams

HEARTBEAT = 0.05


@pytest.fixture
def engine_address(demo_model: Path) -> Iterator[str]:
    flags = ["--model", str(demo_model), "--heartbeat-seconds", str(HEARTBEAT)]
    command = [sys.executable, "-P", "-m", "quire.engine_core", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process.stdout.readline().removeprefix("READY ").strip()
        process.terminate()


def hold_the_interpreter(seconds: float) -> None:
    """Sleep while no thread of this process can run Python."""
    ctypes.PyDLL(None).usleep(ctypes.c_uint(round(seconds * 1e6)))


def test_a_starved_client_keeps_its_streams(engine_address: str) -> None:
    async def run() -> None:
        async with AsyncLLM(engine_address=engine_address) as llm:
            num_tokens = 0
            params = SamplingParams(max_tokens=1500, ignore_eos=True)
            async for output in llm.generate("Once upon a time", params, output_kind="delta"):
                if num_tokens == 0:
                    hold_the_interpreter(40 * HEARTBEAT)
                num_tokens += len(output.outputs[0].token_ids)
            assert num_tokens == 1500

    asyncio.run(run())
