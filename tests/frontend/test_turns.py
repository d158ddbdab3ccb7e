"""Long work on an event loop in turns: what goes on meanwhile, and whose turn it is."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator

import pytest
import uvloop

from quire.frontend import turns
from quire.frontend.turns import SLICE_SECONDS, LoopWork, current_work, doing, free, in_turns

Main = Callable[[Awaitable[None]], None]
PER_SLICE = 4  # items


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Callable[[Awaitable[None]], None]:
    def run(main: Awaitable[None]) -> None:
        with asyncio.Runner(loop_factory=request.param) as runner:
            runner.run(main)  # type: ignore[arg-type]

    return run


class Clock:
    """A clock that moves with the items that are done, and counts those of each turn of the loop."""

    def __init__(self) -> None:
        self.now = 0.0
        self.done: list[object] = []
        self.per_turn: list[int] = []

    def monotonic(self) -> float:
        return self.now

    def do(self, item: object) -> None:
        self.now += SLICE_SECONDS / PER_SLICE
        self.done.append(item)

    async def watch(self) -> None:
        """Count the items of each turn of the loop, until cancelled."""
        while True:
            before = len(self.done)
            await asyncio.sleep(0)
            self.per_turn.append(len(self.done) - before)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(turns, "time", clock)
    return clock


async def watched(clock: Clock, *tasks: Awaitable[None]) -> None:
    watcher = asyncio.ensure_future(clock.watch())
    await asyncio.gather(*tasks)
    watcher.cancel()


async def long_work(clock: Clock, name: str, count: int, work: LoopWork | None = None) -> None:
    with doing(work or LoopWork()):
        async for item in in_turns(range(count)):
            clock.do((name, item))


def test_the_loop_turns_between_the_slices_of_long_work(run: Main, clock: Clock) -> None:
    run(watched(clock, long_work(clock, "a", 1000)))
    assert len(clock.done) == 1000
    assert max(clock.per_turn) <= PER_SLICE + 1
    assert len([count for count in clock.per_turn if count]) > 150


def test_much_work_at_once_shares_the_slice_of_a_turn(run: Main, clock: Clock) -> None:
    """Each does an item or two, and only one of them more."""
    names = "abcdefghijklmnop"
    run(watched(clock, *(long_work(clock, name, 100) for name in names)))
    assert len(clock.done) == 100 * len(names)
    assert max(clock.per_turn) <= 2 * len(names) + PER_SLICE
    half = clock.done[: len(clock.done) // 2]
    assert min(sum(each[0] == name for each in half) for name in names) >= 25  # type: ignore[index] # a name and a number


def test_the_tasks_of_one_piece_of_work_take_turns_in_order(run: Main, clock: Clock) -> None:
    work = LoopWork()

    async def one(number: int) -> None:
        await work.turn()
        clock.do(number)

    run(watched(clock, *(one(number) for number in range(300))))
    assert clock.done == list(range(300))
    assert max(clock.per_turn) <= 8 + PER_SLICE


def test_small_work_waits_for_no_turn_of_long_work(run: Main, clock: Clock) -> None:
    async def main() -> None:
        long = asyncio.ensure_future(long_work(clock, "long", 10_000))
        await asyncio.sleep(0)
        for _ in range(50):
            before, small = len(clock.per_turn), LoopWork()
            await small.turn()
            assert len(clock.per_turn) == before
            await asyncio.sleep(0)
        long.cancel()
        await asyncio.wait([long])

    run(watched(clock, main()))


def test_cancelled_tasks_hold_nobody_up(run: Main, clock: Clock) -> None:
    async def main() -> None:
        work = LoopWork()
        tasks = [asyncio.ensure_future(long_work(clock, str(number), 20, work)) for number in range(50)]
        await asyncio.sleep(0)
        for task in tasks[::2]:
            task.cancel()
        await asyncio.wait(tasks)
        assert [task.cancelled() for task in tasks] == [True, False] * 25

    run(main())


def test_tasks_belong_to_the_work_in_which_they_start(run: Main) -> None:
    async def main() -> None:
        assert current_work() is not current_work()
        assert current_work("a").tenant == "a"
        with doing(LoopWork("b")) as _:
            task = asyncio.ensure_future(_tenant())
        assert await task == "b"
        assert current_work().tenant == ""

    async def _tenant() -> str:
        return current_work("a").tenant

    run(main())


def test_freeing_empties_a_list_in_turns(run: Main, clock: Clock) -> None:
    class Item:
        def __del__(self) -> None:
            clock.do("freed")

    def items() -> Iterator[Item]:
        return (Item() for _ in range(200))

    async def main() -> None:
        await free(None)
        held = list(items())
        await free(held)
        assert held == []

    run(watched(clock, main()))
    assert len(clock.done) == 200
    assert max(clock.per_turn) <= PER_SLICE + 1
