"""Watches what an engine does for all its clients, and stops its process to hold a moment still."""

from __future__ import annotations

import os
import queue
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self

from http_server import Server
from patience import PATIENCE

from quire.frontend.client.engine_client import CoreClient
from quire.protocol.messages import EventType, RequestEvent, StepTrace


class EngineWatch:
    """The steps of a server's engine from now on, or from when it is `idle`."""

    def __init__(self, server: Server, *, idle: bool = True) -> None:
        self._steps: queue.Queue[StepTrace] = queue.Queue()
        self._client = CoreClient(server.engine_address, lambda _: None)
        if idle:
            self.wait_for(running=0, waiting=0)
        self._client.start_trace(self._steps.put).result(PATIENCE)

    @property
    def pid(self) -> int:
        """The process of the engine."""
        return self._client.ready.engine_pid

    def until(self, is_it: Callable[[StepTrace], bool]) -> list[StepTrace]:
        """The steps up to the first one that is it."""
        steps: list[StepTrace] = []
        while not (steps and is_it(steps[-1])):
            steps.append(self._steps.get(timeout=PATIENCE))
        return steps

    def event(self, kind: EventType) -> RequestEvent:
        """The next event of a kind: QUEUED, SCHEDULED, PREEMPTED or FINISHED."""
        step = self.until(lambda step: any(event.type is kind for event in step.events))[-1]
        return next(event for event in step.events if event.type is kind)

    def decode(self) -> int:
        """The number of the next request that is started, once a step decodes."""
        number = self.event(EventType.SCHEDULED).number
        self.until(lambda step: step.stats is not None and step.stats.decode_tokens > 0)
        return number

    def wait_for(self, **expected: int) -> None:
        """Wait until the engine's statistics have these values, such as running=1."""

        def is_so() -> bool:
            stats: dict[str, Any] = self._client.call("stats").result(PATIENCE)
            return expected.items() <= stats.items()

        wait_until(is_so, f"the engine's statistics never were {expected}")

    def shut_down(self) -> None:
        """Stop the engine, as an operator does."""
        self._client.call("shutdown").result(PATIENCE)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()


def engine_pid(server: Server) -> int:
    """The process of the server's engine, and not of one that stands by."""
    client = CoreClient(server.engine_address, lambda _: None)
    try:
        return client.ready.engine_pid
    finally:
        client.close()


@contextmanager
def halted(pid: int) -> Iterator[None]:
    """Hold an engine's process still, wherever it is in its step."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def wait_until(is_so: Callable[[], object], what: str) -> None:
    """Look until it is so."""
    deadline = time.monotonic() + PATIENCE
    while not is_so():
        assert time.monotonic() < deadline, what
        os.sched_yield()
