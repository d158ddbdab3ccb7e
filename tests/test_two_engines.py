"""Two engines: one fetches KV pages from the other, which may be computing them, or be gone. The bits are the same."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from engine_pairs import Pair, ask, pair
from engine_process import DealerClient, EngineUnderTest
from patience import PATIENCE

from quire.frontend import LLM, AsyncLLM, SamplingParams
from quire.frontend.errors import EngineConnectionError
from quire.protocol.keys import generate_keys
from quire.protocol.messages import (
    Abort,
    EngineCoreRequest,
    FinishReason,
    KvFetch,
    KvFetched,
    KvPage,
    Role,
    UtilityCall,
)
from quire.protocol.messages import SamplingParams as EngineParams

PAGE = 32
PROMPT = [10 + 7 * i % 2000 for i in range(1900)]
OTHER = [10 + 11 * i % 2000 for i in range(1200)]
SLOW = ["--long-prefill-token-threshold", "4"]  # so that a prompt takes hundreds of steps
QUICK_HEARTBEAT = ["--heartbeat-seconds", "0.1"]


@pytest.fixture(scope="module")
def expected(demo_model: Path) -> dict[int, list[int]]:
    """The tokens of one engine alone, by the length of the prompt."""
    with EngineUnderTest(demo_model) as engine, DealerClient(engine.address) as client:
        for prompt in (PROMPT, OTHER):
            ask(client, str(len(prompt)), prompt)
        return {len(prompt): client.tokens(str(len(prompt))) for prompt in (PROMPT, OTHER)}


def test_a_prompt_that_the_peer_computes_is_fetched(demo_model: Path, expected: dict[int, list[int]]) -> None:
    with pair(demo_model) as engines:
        engines.connect()
        engines.ask_both(PROMPT)
        assert engines.d.tokens("r") == expected[len(PROMPT)]
        assert max(output.num_cached_tokens for output in engines.d.outputs("r")) == len(PROMPT) // PAGE * PAGE
        engines.p.end("r")
        stats = engines.d.call("stats")
        assert stats["kv_peer_pages_fetched"] == len(PROMPT) // PAGE
        assert stats["totals"]["prefill_tokens"] < PAGE
        assert stats["kv_peer_failures"] == 0
        assert engines.p.call("stats")["kv_peer_pages_served"] == len(PROMPT) // PAGE


def test_what_the_peer_has_is_fetched_unasked(demo_model: Path, expected: dict[int, list[int]]) -> None:
    with pair(demo_model) as engines:
        engines.connect()
        ask(engines.p, "first", PROMPT[:1000], 1)
        engines.p.end("first")
        ask(engines.d, "r", PROMPT)
        assert engines.d.tokens("r") == expected[len(PROMPT)]
        assert engines.num_fetched == 1000 // PAGE
        ask(engines.d, "unknown", OTHER)
        assert engines.d.tokens("unknown") == expected[len(OTHER)]
        assert engines.num_fetched == 1000 // PAGE


def test_a_cache_salt_keeps_prefixes_apart_from_other_engines_too(demo_model: Path) -> None:
    with pair(demo_model) as engines:
        engines.connect()
        engines.p.send(EngineCoreRequest("p", PROMPT, EngineParams(max_tokens=1), cache_salt="ours"))
        engines.p.end("p")
        for salt, pages in (("theirs", 0), ("ours", len(PROMPT) // PAGE)):
            engines.d.send(EngineCoreRequest(salt, PROMPT, EngineParams(max_tokens=1), cache_salt=salt))
            engines.d.end(salt)
            assert engines.num_fetched == pages


def test_pages_come_before_the_prompt_is_done(demo_model: Path, expected: dict[int, list[int]]) -> None:
    with pair(demo_model, "--long-prefill-token-threshold", "1") as engines:  # the abort must not come too late
        engines.connect()
        engines.ask_both(PROMPT)
        engines.d.until(lambda: engines.num_fetched > 0)
        engines.p.send(Abort(["r"]))
        assert engines.p.end("r").finish_reason is FinishReason.ABORT  # it had not come to its end
        assert engines.d.tokens("r") == expected[len(PROMPT)]
        assert 0 < engines.num_fetched < len(PROMPT) // PAGE
        cached = max(output.num_cached_tokens for output in engines.d.outputs("r"))
        assert cached == engines.num_fetched * PAGE  # what has come is not computed again


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP, signal.SIGINT])
def test_a_peer_that_ends_or_stops_amid_a_transfer(
    demo_model: Path, expected: dict[int, list[int]], number: signal.Signals
) -> None:
    with pair(demo_model, *SLOW, *QUICK_HEARTBEAT) as engines:
        engines.connect()
        engines.ask_both(PROMPT)
        engines.d.until(lambda: engines.num_fetched > 0)
        engines.prefill.process.send_signal(number)
        assert engines.d.tokens("r") == expected[len(PROMPT)]
        assert 0 < engines.num_fetched < len(PROMPT) // PAGE
        ask(engines.d, "alone", OTHER, remote_prefill=True)
        assert engines.d.tokens("alone") == expected[len(OTHER)]
        assert engines.d.call("stats")["kv_peer_failures"] >= 1
        if number is signal.SIGSTOP:  # it comes back, and is used again
            engines.prefill.process.send_signal(signal.SIGCONT)
            engines.connect()
        engines.prefill.process.kill()
        engines.prefill.process.wait(PATIENCE)


def test_a_prompt_that_the_peer_never_gets_is_computed(demo_model: Path, expected: dict[int, list[int]]) -> None:
    with pair(demo_model) as engines:
        engines.connect()
        ask(engines.d, "r", PROMPT, remote_prefill=True)
        assert engines.d.tokens("r") == expected[len(PROMPT)]
        assert engines.num_fetched == 0


def test_streams_go_on_while_pages_come(demo_model: Path, expected: dict[int, list[int]]) -> None:
    with pair(demo_model, *SLOW) as engines:
        engines.connect()
        ask(engines.d, "stream", [40, 50, 60], 400)
        engines.d.until(lambda: bool(engines.d.outputs("stream")))
        engines.ask_both(PROMPT)
        assert engines.d.tokens("r") == expected[len(PROMPT)]
        assert len(engines.d.tokens("stream")) == 400
        queued, scheduled = (
            next(event.timestamp for output in engines.d.outputs("r") for event in output.events if event.type == kind)
            for kind in (1, 2)
        )
        assert scheduled > queued
        assert engines.d.call("stats")["totals"]["prefill_tokens"] < 2 * PAGE


def test_more_prompts_than_are_fetched_at_once(demo_model: Path) -> None:
    prompts = {f"r{i}": [20 + i, *PROMPT[:400]] for i in range(20)}
    with pair(demo_model, "--num-pages", "1024", decode_flags=("--num-pages", "1024")) as engines:
        engines.connect()
        for name, prompt in prompts.items():
            engines.ask_both(prompt, name)
        answers = {name: engines.d.tokens(name) for name in prompts}
        assert 0 < engines.num_fetched <= len(prompts) * (401 // PAGE)  # on a busy host some are computed here
        for name, prompt in prompts.items():
            engines.p.end(name)
            ask(engines.p, f"again-{name}", prompt)
            assert engines.p.tokens(f"again-{name}") == answers[name]


def test_a_peer_with_other_kv_is_refused(demo_model: Path, expected: dict[int, list[int]]) -> None:
    with pair(demo_model, "--kv-cache-dtype", "int8") as engines:
        engines.d.until(lambda: engines.d.call("stats")["kv_peer_failures"] > 0)
        engines.ask_both(PROMPT)
        assert engines.d.tokens("r") == expected[len(PROMPT)]
        stats = engines.d.call("stats")
        assert (stats["kv_peer_connected"], stats["kv_peer_pages_fetched"], stats["kv_peer_failures"]) == (0, 0, 1)
        engines.p.end("r")


def test_pages_that_are_being_served_go_when_a_request_needs_them(demo_model: Path) -> None:
    with EngineUnderTest(demo_model, "--num-pages", "64") as engine, DealerClient(engine.address) as client:
        ask(client, "prompt", PROMPT, 1)
        client.end("prompt")
        pages = len(PROMPT) // PAGE
        client.send(KvFetch(1, PROMPT[: pages * PAGE + 1], "", 0, pages))
        client.until(lambda: any(isinstance(message, KvPage) for message in client.messages))
        assert client.call("stats")["pages_held"] == pages  # as nothing is acknowledged
        ask(client, "other", OTHER)
        client.tokens("other")
        client.first(KvFetched)
        assert sum(isinstance(message, KvPage) for message in client.messages) < pages
        client.wait_until_at_rest()


def test_a_fetch_that_cannot_be_served_is_answered(demo_model: Path) -> None:
    with EngineUnderTest(demo_model) as engine, DealerClient(engine.address) as client:
        wrong = [
            KvFetch(1, [], "", 0, 1),
            KvFetch(2, [10**6], "", 0, 1),
            KvFetch(3, [2**60], "", 0, 1),
            KvFetch(4, [1], "", -1, 1),
            KvFetch(5, [1], "", 0, 0),
            KvFetch(6, [1] * 5000, "", 0, 1),
        ]
        for message in wrong:
            client.send(message)
        client.until(lambda: sum(isinstance(message, KvFetched) for message in client.messages) == len(wrong))
        assert all(message.error for message in client.messages if isinstance(message, KvFetched))
        client.wait_until_at_rest()


def test_a_client_that_leaves_amid_a_fetch_leaves_no_page_held(demo_model: Path) -> None:
    with EngineUnderTest(demo_model) as engine, DealerClient(engine.address) as client:
        ask(client, "prompt", PROMPT, 1)
        client.end("prompt")
        with DealerClient(engine.address) as other:
            pages = len(PROMPT) // PAGE
            other.send(KvFetch(1, PROMPT[: pages * PAGE + 1], "", 0, pages))
            other.until(lambda: any(isinstance(message, KvPage) for message in other.messages))
        client.until(lambda: client.call("stats")["pages_held"] == 0)
        client.wait_until_at_rest()


# The frontend


def test_a_frontend_has_long_prompts_computed_by_the_other_engine(
    demo_model: Path, expected: dict[int, list[int]]
) -> None:
    params = SamplingParams(seed=1, max_tokens=8, ignore_eos=True)
    with pair(demo_model, *SLOW, *QUICK_HEARTBEAT) as engines:
        engines.connect()
        with LLM(engine_address=engines.decode.address, prefill_address=(engines.prefill.address,)) as llm:

            def answer(prompt: list[int]) -> list[int]:
                output = llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)[0]
                return list(output.outputs[0].token_ids)

            assert answer(PROMPT) == expected[len(PROMPT)]
            assert engines.num_fetched == len(PROMPT) // PAGE
            answer(OTHER[:100])
            assert engines.num_fetched == len(PROMPT) // PAGE  # too short
            engines.prefill.process.kill()
            engines.prefill.process.wait(PATIENCE)
            assert answer(OTHER) == expected[len(OTHER)]
            assert engines.num_fetched == len(PROMPT) // PAGE
            with EngineUnderTest(demo_model, address=engines.prefill.address):
                engines.connect()
                deadline, count = time.monotonic() + PATIENCE, 0
                while engines.num_fetched == len(PROMPT) // PAGE:  # once the frontend has found it too
                    assert time.monotonic() < deadline
                    count += 1
                    answer([20 + count, *PROMPT[:700]])


def test_completions_of_one_prompt_wait_for_it_together(demo_model: Path) -> None:
    params = SamplingParams(n=3, seed=1, max_tokens=8, ignore_eos=True)
    answers = []
    with pair(demo_model, *SLOW) as engines:
        engines.connect()
        for prefill in ((engines.prefill.address,), ()):
            with LLM(engine_address=engines.decode.address, prefill_address=prefill) as llm:
                output = llm.generate({"prompt_token_ids": PROMPT}, params, use_tqdm=False)[0]
            answers.append([list(completion.token_ids) for completion in output.outputs])
            assert engines.num_fetched == len(PROMPT) // PAGE
            for client in (engines.d, engines.p):
                client.send(UtilityCall(10**6, "reset_cache"))
    assert answers[0] == answers[1]


def test_an_aborted_request_leaves_both_engines(demo_model: Path) -> None:
    async def leave_soon(address: str, prefill_address: str, engines: Pair) -> None:
        async with AsyncLLM(engine_address=address, prefill_address=(prefill_address,)) as llm:
            stream = llm.generate({"prompt_token_ids": PROMPT}, SamplingParams(max_tokens=8))
            first = asyncio.ensure_future(anext(stream))
            await asyncio.to_thread(engines.p.until, lambda: engines.p.call("stats")["running"] > 0)
            first.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await first
            await asyncio.to_thread(engines.p.until, lambda: engines.p.call("stats")["running"] == 0)

    with pair(demo_model, *SLOW) as engines:
        engines.connect()
        asyncio.run(leave_soon(engines.decode.address, engines.prefill.address, engines))
        assert engines.p.call("stats")["totals"]["prefill_tokens"] < len(PROMPT)


def test_a_frontend_needs_two_engines_that_fit(demo_model: Path) -> None:
    with (
        EngineUnderTest(demo_model) as one,
        pytest.raises(EngineConnectionError, match="either answer requests or compute prompts"),
    ):
        LLM(engine_address=one.address, prefill_address=(one.address,))
    with (
        EngineUnderTest(demo_model) as one,
        EngineUnderTest(demo_model, "--no-enable-prefix-caching") as other,
        pytest.raises(EngineConnectionError, match="needs an engine with a prefix cache"),
    ):
        LLM(engine_address=other.address, prefill_address=(one.address,))
    with (
        EngineUnderTest(demo_model, "--max-model-len", "1024") as one,
        EngineUnderTest(demo_model, "--kv-peer", one.address) as other,
        pytest.raises(EngineConnectionError, match="max_model_len 1024"),
    ):
        LLM(engine_address=other.address, prefill_address=(one.address,))


def test_several_engines_share_the_prompts_and_come_and_go(demo_model: Path, expected: dict[int, list[int]]) -> None:
    """The engine that answers needs no options for it."""
    params = SamplingParams(seed=1, max_tokens=8, ignore_eos=True)

    async def answer(llm: AsyncLLM, prompt: list[int]) -> list[int]:
        outputs = [output async for output in llm.generate({"prompt_token_ids": prompt}, params)]
        return list(outputs[-1].outputs[0].token_ids)

    async def fetches(llm: AsyncLLM) -> None:
        """Ask until pages have come: without a connection yet, or on a busy host, prompts are computed."""
        before, number = await num_fetched(llm), 0
        while await num_fetched(llm) == before:
            number += 1
            await answer(llm, [500 + number, *PROMPT[:639]])
        assert llm.num_prefills() == {}

    async def num_fetched(llm: AsyncLLM) -> float:
        return float((await llm.stats()).get("kv_peer_pages_fetched", 0))

    async def main(decode: str, first: str, second: str) -> None:
        options: dict[str, Any] = {"prefill_address": (first, second), "router": "least-loaded"}
        async with AsyncLLM(engine_address=decode, **options) as llm, asyncio.timeout(PATIENCE):
            assert [(each.number, each.is_prefill) for each in llm.engines()] == [(0, False), (1, True), (2, True)]
            await fetches(llm)
            assert set(await llm.engine_stats()) == {0, 1, 2}
            assert (await llm.snapshot(1)).stats.pages_total == (await llm.snapshot(0)).stats.pages_total
            assert await answer(llm, PROMPT) == expected[len(PROMPT)]
            assert await answer(llm, OTHER) == expected[len(OTHER)]
            await llm.reset_prefix_cache()
            with pytest.raises(EngineConnectionError, match="in use already"):
                await llm.add_engine(first, is_prefill=True)
            await llm.remove_engine(1)
            await fetches(llm)
            await llm.drain_engine(2)
            before = await num_fetched(llm)
            assert await answer(llm, PROMPT) == expected[len(PROMPT)]
            await llm.remove_engine(2)
            assert await answer(llm, OTHER) == expected[len(OTHER)]
            assert await num_fetched(llm) == before
            while (await llm.stats())["kv_peer_connected"]:  # noqa: ASYNC110 - of the engine's own threads
                await asyncio.sleep(0.01)
            assert await llm.add_engine(first, is_prefill=True) > 2
            await llm.reset_prefix_cache()
            await fetches(llm)
            assert await answer(llm, PROMPT) == expected[len(PROMPT)]

    with (
        EngineUnderTest(demo_model) as decode,
        EngineUnderTest(demo_model, *SLOW) as first,
        EngineUnderTest(demo_model, *SLOW) as second,
    ):
        asyncio.run(main(decode.address, first.address, second.address))
        for engine in (decode, first, second):
            with DealerClient(engine.address) as client:
                stats = client.call("stats")
                assert (stats["pages_held"], stats["pages_free"] + stats["pages_cached"]) == (0, stats["pages_total"])


@pytest.mark.parametrize("role", [Role.ADMIN, Role.CLIENT])
def test_pages_travel_over_tcp_with_an_administrators_key(
    demo_model: Path, expected: dict[int, list[int]], tmp_path: Path, role: Role
) -> None:
    keys = tmp_path / "keys"
    generate_keys(keys)
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    for file in keys.iterdir():
        (theirs / file.name).write_bytes(file.read_bytes())
        (theirs / file.name).chmod(0o600)
    if role is Role.CLIENT:
        (theirs / "admin.secret").unlink()
    with (
        EngineUnderTest(demo_model, "--curve-keys", str(keys), address="tcp://127.0.0.1:0") as one,
        EngineUnderTest(demo_model, "--curve-keys", str(theirs), "--kv-peer", one.address) as other,
        LLM(engine_address=other.address, curve_keys=str(keys), prefill_address=(one.address,)) as llm,
    ):
        attribute = "kv_peer_connected" if role is Role.ADMIN else "kv_peer_failures"
        while not llm.stats()[attribute]:
            pass  # each look is a round trip
        params = SamplingParams(seed=1, max_tokens=8, ignore_eos=True)
        output = llm.generate({"prompt_token_ids": PROMPT}, params, use_tqdm=False)[0]
        assert list(output.outputs[0].token_ids) == expected[len(PROMPT)]
        assert llm.stats()["kv_peer_pages_fetched"] == (len(PROMPT) // PAGE if role is Role.ADMIN else 0)
