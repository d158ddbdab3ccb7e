"""The main loop: how it sleeps, and the ways it ends."""

from __future__ import annotations

import itertools
import math
import queue
import threading
import time
from collections.abc import Callable

import pytest
from paged_executor import Engine, expected_tokens
from patience import PATIENCE

from quire.engine_core.loop import EngineLoop
from quire.engine_core.transport.server import Inbox
from quire.protocol.messages import EngineCoreRequest, FinishReason, SamplingParams


class FakeServer:
    """A server that records the loop's signs of life."""

    def __init__(self) -> None:
        self.failure: BaseException | None = None
        self.last_step = 0.0


class Running:
    """A loop in a thread of its own."""

    def __init__(self, engine: Engine, *, drain_seconds: float = PATIENCE) -> None:
        self.engine, self.server, self.inbox = engine, FakeServer(), queue.SimpleQueue[object]()
        inbox: Inbox = self.inbox  # type: ignore[assignment]
        self.loop = EngineLoop(engine.core, self.server, inbox, drain_seconds=drain_seconds)
        self.error: Exception | None = None
        self.gave_way: bool | None = None
        self.thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        try:
            self.gave_way = not self.loop.run()
        except Exception as error:  # noqa: BLE001 - looked at by the test
            self.error = error

    def add(self, request_id: str, prompt: list[int], max_tokens: int) -> None:
        self.inbox.put(
            (b"client", EngineCoreRequest(request_id, prompt, SamplingParams(seed=0, max_tokens=max_tokens)))
        )

    def join(self) -> None:
        self.thread.join(timeout=PATIENCE)
        assert not self.thread.is_alive()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        threading.Event().wait(0.002)


def test_a_drain_lets_requests_end_first() -> None:
    running = Running(Engine())
    running.add("a", [1, 2], 50)
    running.loop.drain()
    running.add("late", [1], 2)
    running.thread.start()
    running.join()
    assert running.error is None
    assert running.engine.tokens("a") == expected_tokens([1, 2], 0, 1000, 50)
    assert "shutting down" in (running.engine.end("late").error or "")


def test_a_drain_has_its_time() -> None:
    running = Running(Engine(max_model_len=10**9, num_pages=10**6), drain_seconds=0.05)
    running.add("endless", [1, 2], 10**8)
    running.loop.drain()
    running.thread.start()
    running.join()
    assert running.engine.end("endless").finish_reason is FinishReason.ABORT


def test_a_flood_of_messages_delays_no_step_and_no_other_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time passes with each message, so that a few of them are as many as there is time for between two steps."""
    engine, now = Engine(max_waiting_requests=10_000), itertools.count()
    monkeypatch.setattr("quire.engine_core.loop.time.monotonic", lambda: next(now) * 1e-3)
    running = Running(engine)
    for index in range(1000):
        running.add(f"flood {index}", [1, 2], 2)
    alone = EngineCoreRequest("alone", [1, 2], SamplingParams(seed=0, max_tokens=2))
    running.inbox.put((b"other", alone))
    running.loop.drain()
    running.thread.start()
    running.join()
    assert running.error is None
    steps = [list(step) for step in engine.executor.steps]
    assert len(steps[0]) < 20
    assert "alone" in steps[0]
    assert len(engine.tokens("flood 0")) == len(engine.tokens("alone", b"other")) == 2
    assert "shutting down" in (engine.end("flood 999").error or "")


def test_stop_aborts_at_once() -> None:
    running = Running(Engine(max_model_len=10**9, num_pages=10**6))
    running.add("endless", [1, 2], 10**8)
    running.thread.start()
    wait_until(lambda: len(running.engine.outputs("endless")) > 0)
    running.loop.stop()
    running.join()
    assert running.engine.end("endless").finish_reason is FinishReason.ABORT
    assert running.engine.executor.sequences.held_pages == 0


def test_an_idle_loop_says_so_and_wakes_for_a_request() -> None:
    running = Running(Engine())
    running.thread.start()
    wait_until(lambda: running.server.last_step == math.inf)
    running.add("a", [1, 2], 3)
    wait_until(lambda: len(running.engine.tokens("a")) == 3)
    wait_until(lambda: running.server.last_step == math.inf)
    running.loop.drain()
    running.join()


def test_an_engine_that_gives_way_may_still_be_ended_for_good() -> None:
    """A drain lets those start too that were held back, as no other engine takes them."""
    running = Running(Engine())
    running.loop.give_way(0.0, least=math.inf)
    running.add("a", [1, 2], 3)
    running.thread.start()
    wait_until(lambda: running.engine.core.has_requests)
    assert running.thread.is_alive()
    running.loop.drain()
    running.join()
    assert running.gave_way is False
    assert len(running.engine.tokens("a")) == 3


def test_the_loop_ends_when_the_socket_has_failed() -> None:
    running = Running(Engine())
    running.server.failure = OSError("the socket is gone")
    running.thread.start()
    running.join()
    assert isinstance(running.error, RuntimeError)
    assert running.error.__cause__ is running.server.failure


def test_a_fault_of_the_engine_ends_every_request_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    running = Running(Engine())
    running.add("a", [1, 2], 3)
    monkeypatch.setattr(running.engine.executor.sequences, "start", lambda _slot, _num_tokens: None)
    running.thread.start()
    running.join()
    assert isinstance(running.error, RuntimeError)
    assert "promised KV pages" in (running.engine.end("a").error or "")
