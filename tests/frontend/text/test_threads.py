"""Threads on which tenants take turns."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest
from patience import PATIENCE

from quire.frontend.text.prompts import LONG_TEXT
from quire.frontend.text.threads import FairThreads, TextThreads, size_of
from quire.frontend.turns import LoopWork, doing


def start(threads: FairThreads, tenant: str, work: Callable[[], str]) -> asyncio.Task[str]:
    with doing(LoopWork(tenant)):
        return asyncio.create_task(threads.run(work))


def test_tenants_take_turns_at_a_thread() -> None:
    order: list[str] = []
    opened = threading.Event()

    def first() -> str:
        opened.wait(PATIENCE)
        return "first"

    def job(name: str) -> Callable[[], str]:
        def work() -> str:
            order.append(name)
            return name

        return work

    async def main() -> None:
        threads = FairThreads(1, "test")
        tasks = [start(threads, "a", first)]
        names = ["a1", "a2", "a3", "a4", "b1", "b2", "c1"]
        tasks += [start(threads, name[0], job(name)) for name in names]
        await asyncio.sleep(0)
        opened.set()
        assert await asyncio.gather(*tasks) == ["first", *names]
        threads.close()

    asyncio.run(main())
    assert order == ["a1", "b1", "c1", "a2", "b2", "a3", "a4"]


def test_a_tenant_leaves_a_thread_to_others() -> None:
    opened = threading.Event()
    running = threading.Semaphore(0)

    def hold() -> str:
        running.release()
        opened.wait(PATIENCE)
        return "held"

    async def main() -> None:
        threads = FairThreads(3, "test")
        crowd = [start(threads, "a", hold) for _ in range(6)]
        assert await asyncio.to_thread(lambda: [running.acquire(timeout=PATIENCE) for _ in range(2)]) == [True, True]
        assert await start(threads, "b", lambda: "short") == "short"  # beside what takes all the time
        assert not running.acquire(blocking=False)
        opened.set()
        assert await asyncio.gather(*crowd) == ["held"] * 6
        threads.close()

    asyncio.run(main())


def test_errors_and_cancelled_work_leave_the_threads_to_the_rest() -> None:
    opened = threading.Event()

    def fail() -> str:
        opened.wait(PATIENCE)
        raise ValueError("broken")

    async def main() -> None:
        threads = FairThreads(1, "test")
        failing, cancelled = start(threads, "a", fail), start(threads, "a", lambda: "cancelled")
        last = start(threads, "a", lambda: "last")
        await asyncio.sleep(0)
        cancelled.cancel()
        await asyncio.sleep(0)
        opened.set()
        with pytest.raises(ValueError, match="broken"):
            await failing
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        assert await last == "last"
        threads.close()

    asyncio.run(main())


def test_short_input_is_worked_on_at_once() -> None:
    async def main() -> None:
        threads, here = TextThreads(), threading.get_ident()
        assert await threads.run(threading.get_ident, "short") == here
        assert await threads.run(threading.get_ident, "x" * (LONG_TEXT + 1)) != here
        assert await threads.run(threading.get_ident, [7] * 20 * LONG_TEXT) != here

    asyncio.run(main())


def test_the_size_of_input_counts_characters_and_entries() -> None:
    assert size_of(["abc", [1, 2], {"key": ["de", b"f"]}, None, 7], 100) == 5 + 3 + 2 + 1 + 2 + 2 + 1
    assert size_of([[7] * 1000] * 1000, 5000) >= 5000


def test_work_in_python_waits_for_other_such_work_but_not_for_texts() -> None:
    async def main() -> None:
        threads, begun, opened = TextThreads(), threading.Event(), threading.Event()

        def first() -> str:
            begun.set()
            opened.wait(PATIENCE)
            return "first"

        waiting = asyncio.create_task(threads.run_python(first, LONG_TEXT + 1))
        await asyncio.to_thread(begun.wait, PATIENCE)
        second = asyncio.create_task(threads.run_python(threading.get_ident, LONG_TEXT + 1))
        assert await threads.run(lambda: "text", "x" * (LONG_TEXT + 1)) == "text"
        assert await threads.run_python(threading.get_ident, LONG_TEXT) == threading.get_ident()
        assert not second.done()
        opened.set()
        assert await waiting == "first"
        assert await second != threading.get_ident()

    asyncio.run(main())
