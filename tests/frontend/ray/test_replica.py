"""Replicas of the engine behind the connection of an ingress, without Ray: real engines, called directly."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from typing import Any

import pytest
from patience import PATIENCE

from quire.frontend import LLM, SamplingParams
from quire.frontend.ray.cached_prefixes import decode_keys
from quire.frontend.ray.ingress import ReplicatedLLM
from quire.frontend.ray.replica import PREFIXES, EngineReplica
from quire.protocol.routing.prefix_outline import shared_page_keys

OPTIONS: dict[str, Any] = {"num_pages": 128, "start_timeout": PATIENCE}
PROMPTS = [f"Once upon a time there were {count} foxes" for count in range(6)]
PARAMS = [SamplingParams(max_tokens=120, ignore_eos=True, seed=index, logprobs=1) for index in range(len(PROMPTS))]


class DirectCall:
    """A call of a replica's relay, in this process."""

    def __init__(self, items: AsyncGenerator[bytes, None]) -> None:
        self._items = items

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self._items

    def cancel(self) -> None:
        """See `ReplicaCall`. The replica's code runs on, as far as the end of the call lets it."""
        self.closing = asyncio.ensure_future(self._items.aclose())


class DirectReplicas:
    """Replicas that are called in turn."""

    def __init__(self, replicas: Sequence[Any]) -> None:
        self.replicas = replicas
        self._turn = itertools.cycle(replicas)

    def relay(self, frame: bytes, text_files: str) -> DirectCall:
        """See `Replicas`."""
        return DirectCall(next(self._turn).relay(frame, text_files))

    async def describe(self) -> bytes:
        """See `Replicas`."""
        ready: bytes = await self.replicas[0].describe()
        return ready

    async def call_all(self, frame: bytes) -> Sequence[bytes | Exception]:
        """See `Replicas`."""
        calls = (replica.call(frame) for replica in self.replicas)
        answers: list[bytes | Exception] = await asyncio.gather(*calls, return_exceptions=True)
        return answers


@contextlib.asynccontextmanager
async def _serving(count: int) -> AsyncIterator[ReplicatedLLM]:
    """Serve by so many replicas; at the end no KV page is held."""
    replicas = [EngineReplica.__new__(EngineReplica) for _ in range(count)]
    try:
        for replica in replicas:
            await replica.__init__(OPTIONS)  # type: ignore[misc]
        loop = asyncio.get_running_loop()
        llm = await asyncio.to_thread(ReplicatedLLM, DirectReplicas(replicas), loop, start_timeout=PATIENCE)
        async with llm:
            yield llm
            await _check_pages(llm)
    finally:
        for replica in replicas:
            await asyncio.to_thread(replica.__del__)


async def _check_pages(llm: ReplicatedLLM) -> None:
    async with asyncio.timeout(PATIENCE):
        while (stats := await llm.stats())["running"] + stats["waiting"] + stats["pages_held"]:
            pass  # each look is a round trip to the engines
    assert stats["pages_free"] + stats["pages_cached"] == stats["pages_total"], stats


async def _answer(llm: ReplicatedLLM, index: int, begun: asyncio.Event) -> tuple[list[int], float | None]:
    async for output in llm.generate(PROMPTS[index], PARAMS[index]):
        if len(output.outputs[0].token_ids) > 10:
            begun.set()
    return output.outputs[0].token_ids, output.outputs[0].cumulative_logprob


def _expected() -> list[tuple[list[int], float | None]]:
    with LLM(**OPTIONS) as llm:
        outputs = [output.outputs[0] for output in llm.generate(PROMPTS, PARAMS)]
    return [(output.token_ids, output.cumulative_logprob) for output in outputs]


def test_requests_go_on_at_another_replica_with_the_same_tokens() -> None:
    async def run() -> list[tuple[list[int], float | None]]:
        async with _serving(2) as llm:
            begun = [asyncio.Event() for _ in PROMPTS]
            answers = [asyncio.ensure_future(_answer(llm, index, begun[index])) for index in range(len(PROMPTS))]
            await asyncio.gather(*(event.wait() for event in begun))
            os.kill(llm.engine_info.engine_pid, signal.SIGKILL)
            return list(await asyncio.gather(*answers))

    assert asyncio.run(run()) == _expected()


def test_a_request_whose_consumer_leaves_is_aborted_at_its_replica() -> None:
    async def run() -> None:
        async with _serving(1) as llm:
            async with contextlib.aclosing(llm.generate("A fox", PARAMS[0])) as outputs:
                async for _ in outputs:
                    break
            aborted = llm.generate("A fox", SamplingParams(max_tokens=400, ignore_eos=True), "one")
            reasons = []
            async for output in aborted:
                await llm.abort("one")
                reasons.append(output.outputs[0].finish_reason)
            assert reasons[-1] == "abort"

    asyncio.run(run())


def test_statistics_are_those_of_all_replicas() -> None:
    async def run() -> None:
        async with _serving(2) as llm:
            assert (await llm.stats())["pages_total"] == 2 * OPTIONS["num_pages"]
            for index in range(2):
                await _answer(llm, index, asyncio.Event())
            totals = (await llm.stats())["totals"]
            assert totals["decode_tokens"] >= 2 * 119
            assert await llm.reset_prefix_cache()
            assert (await llm.stats())["pages_cached"] == 0

    asyncio.run(run())


def test_a_replica_with_another_tokenizer_refuses_requests() -> None:
    """As while the application is deployed with another model: the tokens would be read as other text."""

    async def run() -> None:
        replica = EngineReplica.__new__(EngineReplica)
        await replica.__init__(OPTIONS)  # type: ignore[misc]
        try:
            with pytest.raises(RuntimeError, match="another tokenizer"):
                await anext(replica.relay(b"", "other files"))
        finally:
            await asyncio.to_thread(replica.__del__)

    asyncio.run(run())


async def _told(replica: Any, is_right: Callable[[set[int]], bool]) -> set[int]:
    """Return the keys of prefixes that a replica tells routers, once they are right."""
    async with asyncio.timeout(PATIENCE):
        while not is_right(keys := set(decode_keys((await replica.record_routing_stats())[PREFIXES]))):  # noqa: ASYNC110
            await asyncio.sleep(0.01)  # nobody says when the engine has reported
    return keys


def test_a_replica_tells_routers_what_its_engine_has_cached() -> None:
    async def run() -> None:
        async with _serving(1) as llm:
            (replica,) = llm._replicas.replicas  # type: ignore[attr-defined]
            for salt in ("", "tenant"):
                tokens = list(range(1000, 1100))
                params = SamplingParams(max_tokens=1)
                async for _ in llm.generate({"prompt_token_ids": tokens}, params, cache_salt=salt):
                    pass
                keys = shared_page_keys(salt, tokens, llm.engine_info.block_size)
                await _told(replica, set(keys).issubset)
            assert await llm.reset_prefix_cache()
            await _told(replica, lambda told: not told)
            await _answer(llm, 0, asyncio.Event())
            await _told(replica, bool)
            os.kill(llm.engine_info.engine_pid, signal.SIGKILL)
            await _told(replica, lambda told: not told)
            await _answer(llm, 1, asyncio.Event())
            await _told(replica, bool)  # the next engine has been asked, too

    asyncio.run(run())
