"""An engine that is killed leaves its KV pages to the next one, which goes on where the cache ends."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_process import DealerClient, EngineUnderTest

from quire.protocol.messages import EngineCoreOutput, EngineCoreRequest, SamplingParams, TokenLogprobs

PROMPT = random.Random(5).choices(range(300, 2000), k=200)
PARAMS = SamplingParams(seed=7, max_tokens=120, logprobs=2, ignore_eos=True)


@pytest.fixture
def kv_memory() -> Iterator[int]:
    fd = os.memfd_create("quire-kv", os.MFD_CLOEXEC)
    yield fd
    os.close(fd)


def engine(model: Path, fd: int, *flags: str) -> EngineUnderTest:
    return EngineUnderTest(model, "--kv-memory-fd", str(fd), "--log-level", "info", *flags, pass_fds=[fd])


def ask(client: DealerClient, request_id: str, *, cache_salt: str = "") -> list[EngineCoreOutput]:
    client.send(EngineCoreRequest(request_id, PROMPT, PARAMS, cache_salt=cache_salt))
    client.end(request_id)
    return client.outputs(request_id)


def answer(outputs: list[EngineCoreOutput]) -> tuple[list[int], list[TokenLogprobs]]:
    tokens = [token for output in outputs for token in output.new_token_ids]
    return tokens, [entry for output in outputs for entry in output.new_logprobs or ()]


@pytest.mark.parametrize("flags", [(), ("--kv-cache-dtype", "int8"), ("--quantization", "int8")], ids=str)
def test_the_pages_of_a_killed_engine_are_a_cache_hit(demo_model: Path, kv_memory: int, flags: tuple[str, ...]) -> None:
    with engine(demo_model, kv_memory, *flags) as killed, DealerClient(killed.address) as client:
        client.send(EngineCoreRequest("a", PROMPT, PARAMS))
        client.until(lambda: sum(len(output.new_token_ids) for output in client.outputs("a")) >= 50)
        killed.process.kill()
        killed.process.wait()
        early = answer(client.outputs("a"))
    with engine(demo_model, kv_memory, *flags) as after, DealerClient(after.address) as client:
        assert client.call("stats")["pages_cached"] >= 250 // 32
        client.wait_until_at_rest()
        again = ask(client, "a")
        assert again[0].num_cached_tokens == 199 // 32 * 32
        assert ask(client, "b", cache_salt="other")[0].num_cached_tokens == 0
        client.wait_until_at_rest()
    with EngineUnderTest(demo_model, *flags) as undisturbed, DealerClient(undisturbed.address) as client:
        expected = answer(ask(client, "a"))
    assert answer(again) == expected
    assert early == tuple(part[: len(early[0])] for part in expected)


def test_the_engine_says_what_it_took_over(demo_model: Path, kv_memory: int, capfd: pytest.CaptureFixture[str]) -> None:
    with engine(demo_model, kv_memory) as first, DealerClient(first.address) as client:
        ask(client, "a")
    with engine(demo_model, kv_memory) as second:
        assert second.process.poll() is None
    with engine(demo_model, kv_memory, "--block-size", "64"):
        pass
    lines = [line.split("INFO ")[1] for line in capfd.readouterr().err.splitlines() if "took over" in line]
    counts = [" ".join(line.split()[2:7]) for line in lines]
    assert counts == ["0 KV pages (0 tokens)", "9 KV pages (288 tokens)", "0 KV pages (0 tokens)"]
