"""The prompts of one body: how many of them run at once, and what is left of them."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from typing import Any

import pytest

from quire.frontend.http.generation import merged, results_of

COUNT = 1000
MOST_AT_ONCE = 257


class Prompts:
    """Prompts whose answers take a turn of the loop, but for the one with the number `broken`, which fails."""

    def __init__(self, broken: int = -1) -> None:
        self.broken = broken
        self.num_running = self.most_running = 0

    async def answer(self, number: int) -> int:
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        try:
            await asyncio.sleep(0)
            if number == self.broken:
                raise ValueError("broken")
            return number
        finally:
            self.num_running -= 1

    async def stream(self, number: int) -> AsyncGenerator[Any, None]:
        yield await self.answer(number)


async def whole(prompts: Prompts) -> list[int]:
    return await results_of(map(prompts.answer, range(COUNT)))


async def streamed(prompts: Prompts) -> list[int]:
    found: list[tuple[int, Any]] = [item async for item in merged([prompts.stream(i) for i in range(COUNT)])]
    assert all(index == output for index, output in found)
    return sorted(index for index, _ in found)


@pytest.fixture
def no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


WAYS = pytest.mark.parametrize("way", [whole, streamed])


@WAYS
def test_a_body_has_a_bound_of_prompts_at_once(way: Callable[[Prompts], Awaitable[list[int]]]) -> None:
    prompts = Prompts()
    assert asyncio.run(way(prompts)) == list(range(COUNT))  # type: ignore[arg-type]
    assert 1 < prompts.most_running <= MOST_AT_ONCE


@WAYS
@pytest.mark.parametrize("broken", [0, 500, COUNT - 1])
@pytest.mark.usefixtures("no_collection")
def test_a_prompt_that_fails_leaves_nothing_of_the_others(
    way: Callable[[Prompts], Awaitable[list[int]]], broken: int
) -> None:
    """Garbage of thousands of prompts would hold the loop up while it is collected."""

    async def fail() -> tuple[int, int]:
        before, prompts = len(gc.get_objects()), Prompts(broken)
        with pytest.raises(ValueError, match="broken"):
            await way(prompts)
        return prompts.num_running, len(gc.get_objects()) - before

    num_running, num_objects = asyncio.run(fail())
    assert num_running == 0
    assert num_objects < COUNT / 4
