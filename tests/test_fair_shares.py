"""Clients of one engine process share it: turns, and what each may do at its socket."""

from __future__ import annotations

import asyncio
import queue
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from http_server import Server, events_of
from patience import PATIENCE
from raw_http import RawConnection

from quire.frontend import LLM, AsyncLLM, SamplingParams
from quire.frontend.client.engine_client import CoreClient
from quire.frontend.engine_args import DEMO_MODEL
from quire.frontend.errors import RequestError
from quire.protocol.keys import generate_keys
from quire.protocol.messages import EngineCoreRequest, EventType, Role, StepTrace
from quire.protocol.messages import SamplingParams as WireParams

NEEDS_ADMIN = "needs the role admin"


@pytest.fixture(scope="module")
def engine() -> Iterator[LLM]:
    with LLM(num_pages=200, max_num_seqs=4, max_waiting_requests=10_000, start_timeout=PATIENCE) as llm:
        yield llm


def test_6000_requests_of_one_client_delay_another_by_a_few_steps(engine: LLM) -> None:
    steps: queue.Queue[StepTrace] = queue.Queue()
    flood, other = (CoreClient(engine.engine_address, lambda _: None) for _ in range(2))
    try:
        for index in range(6000):
            flood.send(EngineCoreRequest(str(index), [5 + index % 50], WireParams(max_tokens=8, ignore_eos=True)))
        while flood.call("stats").result(PATIENCE)["waiting"] < 2000:
            pass
        other.start_trace(steps.put).result(PATIENCE)
        other.send(EngineCoreRequest("alone", [1, 2, 3], WireParams(max_tokens=1)))
        num_steps, seen = 0, set[EventType]()
        while EventType.FINISHED not in seen:
            step = steps.get(timeout=PATIENCE)
            num_steps += bool(seen) and step.stats is not None
            seen |= {event.type for event in step.events if event.request_id == "alone"}
        assert num_steps <= 10  # one of four answers of eight tokens must end before
        assert flood.call("stats").result(PATIENCE)["waiting"] > 1000
    finally:
        flood.close()
        other.close()


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """Start an engine on tcp; yield its address, and the folder with the keys of a plain client."""
    keys = tmp_path_factory.mktemp("engine") / "keys"
    generate_keys(keys)
    plain = tmp_path_factory.mktemp("plain")
    for name in ("engine.public", "client.secret"):
        (plain / name).write_bytes((keys / name).read_bytes())
        (plain / name).chmod(0o600)
    flags = ["--model", DEMO_MODEL, "--num-pages", "64", "--engine-address", "tcp://127.0.0.1:0"]
    command = [sys.executable, "-P", "-m", "quire.engine_core", *flags, "--curve-keys", str(keys)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            word, address = process.stdout.readline().split()
            assert word == "READY"
            yield address, plain
        finally:
            process.terminate()


def test_a_plain_client_may_generate_and_no_more(guarded: tuple[str, Path]) -> None:
    address, plain = guarded

    async def run() -> None:
        async with AsyncLLM(engine_address=address, curve_keys=str(plain)) as llm:
            assert llm.engine_info.role is Role.CLIENT
            params = SamplingParams(max_tokens=3, ignore_eos=True)
            outputs = [output async for output in llm.generate("Once upon", params, priority=0, tenant="one of mine")]
            assert len(outputs[-1].outputs[0].token_ids) == 3
            with pytest.raises(RequestError, match=f"priority=-1 {NEEDS_ADMIN}"):
                await anext(llm.generate("Once upon", params, priority=-1))
            for call in (llm.reset_prefix_cache(), llm.pin_prefix("Once upon"), llm.snapshot()):
                with pytest.raises(RuntimeError, match=NEEDS_ADMIN):
                    await call
            assert (await llm.stats())["waiting"] == 0

    asyncio.run(asyncio.wait_for(run(), PATIENCE))


def test_a_server_with_a_plain_clients_key_answers_and_shows_no_engine(guarded: tuple[str, Path]) -> None:
    address, plain = guarded
    keys = ["--api-key", "one", "--api-key", "two"]
    with Server.start("--engine-address", address, "--curve-keys", str(plain), *keys) as server:
        headers = {"Authorization": "Bearer one"}
        body = {"prompt": "Once upon a time", "max_tokens": 3}
        assert server.request("/v1/completions", body, headers=headers).status == 200
        with RawConnection(server.url) as connection:
            connection.send(b"GET /view/events HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer one\r\n\r\n")
            lines, stream = b"", connection.begin_reply()
            while b"event: problem" not in lines or not lines.endswith(b"\n\n"):
                lines += stream.readline()
        assert NEEDS_ADMIN in events_of(lines)[-1]["message"]
        assert any("the API keys of this server share one turn" in line for line in server.log)
        server.stop()
