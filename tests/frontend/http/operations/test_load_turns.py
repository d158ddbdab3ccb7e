"""Requests to load adapters take turns, a few at a time and none for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from quire.frontend.http.errors import ApiError
from quire.frontend.http.operations.load_turns import MAX_OPEN, LoadTurns


def work(log: list[str], name: str, gate: asyncio.Event) -> Callable[[], Awaitable[str]]:
    async def done() -> str:
        log.append(f"{name} begins")
        await gate.wait()
        log.append(f"{name} ends")
        return name

    return done


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def test_one_goes_on_at_a_time_and_only_so_many_wait() -> None:
    async def run() -> None:
        turns, log, gate = LoadTurns("the download", 60), list[str](), asyncio.Event()
        asked = [asyncio.ensure_future(turns.work(work(log, str(n), gate))) for n in range(MAX_OPEN)]
        await settle()
        assert log == ["0 begins"]
        with pytest.raises(ApiError, match="8 requests to load adapters are in the download, and no more may") as error:
            await turns.work(work(log, "more", gate))
        assert (error.value.status, error.value.headers) == (429, {"Retry-After": "1"})
        asked[3].cancel()  # its client has left
        gate.set()
        names = await asyncio.gather(*asked, return_exceptions=True)
        assert names[:3] == ["0", "1", "2"]
        assert log == [f"{n} {what}" for n in range(MAX_OPEN) if n != 3 for what in ("begins", "ends")]
        assert await turns.work(work(log, "late", gate)) == "late"

    asyncio.run(run())


def test_work_that_is_left_behind_counts_until_it_ends() -> None:
    async def run() -> None:
        turns, log, gate = LoadTurns("the download", 0.001), list[str](), asyncio.Event()
        for number in range(MAX_OPEN):
            with pytest.raises(ApiError, match=r"the download of this adapter has not ended after 0.001 s") as error:
                await turns.work(work(log, str(number), gate))
            assert error.value.status == 503
        assert log == [f"{number} begins" for number in range(MAX_OPEN)]
        with pytest.raises(ApiError) as refused:
            await turns.work(work(log, "more", gate))
        assert refused.value.status == 429
        gate.set()
        await settle()
        assert await turns.work(work(log, "more", gate)) == "more"

    asyncio.run(run())


def test_one_that_waits_for_too_long_has_not_begun() -> None:
    async def run() -> None:
        turns, log, gate = LoadTurns("the check", 0.001), list[str](), asyncio.Event()
        async with turns._turn:
            with pytest.raises(ApiError, match=r"the check of this adapter has not begun, since others are before it,"):
                await turns.work(work(log, "a", gate))
        assert not log
        gate.set()
        assert await turns.work(work(log, "b", gate)) == "b"

    asyncio.run(run())


def test_errors_of_the_work_are_raised() -> None:
    async def fails() -> str:
        raise ZeroDivisionError

    async def run() -> None:
        turns = LoadTurns("the check", 60)
        for _ in range(MAX_OPEN + 1):
            with pytest.raises(ZeroDivisionError):
                await turns.work(fails)

    asyncio.run(run())
