"""Turns in which connections have their input parsed, so that streams go on beside any flood of it."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

_TURN_SECONDS = 0.002
_REQUEST_SECONDS = 0.00025  # what a request that has begun will take of the loop, roughly
_HEADER_SECONDS = 1e-6  # what each of its headers adds
_PAUSE_SECONDS = 0.001  # after a turn that used up its time: other threads get the interpreter, others the CPU


class Parsing(Protocol):
    """A connection whose input can be parsed."""

    @property
    def address(self) -> str:
        """The client's address, whose connections share its turns."""

    def parse_slice(self) -> bool:
        """Parse a bounded part of the input; return whether more can be parsed now."""


class ParserTurns:
    """Shares the time for parsing of each turn of the loop among addresses, and that of an address among connections.

    A turn of the loop has `_TURN_SECONDS` for it, in all. A request that begins is charged besides, since the loop will
    run it. `clock`: seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._waiting: dict[str, deque[Parsing]] = {}  # the next address first
        self._queued: set[Parsing] = set()
        self._left = _TURN_SECONDS
        self._is_scheduled = False

    def parse(self, connection: Parsing) -> None:
        """Parse the input of a connection: now, while nobody waits and this turn has time left, then in its turns."""
        if connection in self._queued:
            return
        more = True
        while more and not self._waiting and self._left > 0:
            more = self._parse_slice(connection)
        self._schedule()
        if more:
            self.queue(connection)

    def queue(self, connection: Parsing) -> None:
        """Parse the input of a connection in a later turn of the loop."""
        if connection not in self._queued:
            self._queued.add(connection)
            self._waiting.setdefault(connection.address, deque()).append(connection)
            self._schedule()

    def charge_request(self, num_headers: int) -> None:
        """Count a request that has begun."""
        self._left -= _REQUEST_SECONDS + num_headers * _HEADER_SECONDS

    def _next_turn(self) -> None:
        self._left = _TURN_SECONDS
        try:
            while self._waiting and self._left > 0:
                self._parse_next()
        finally:
            self._is_scheduled = False
            if self._waiting or self._left < _TURN_SECONDS:
                self._schedule()

    def _parse_next(self) -> None:
        address = next(iter(self._waiting))
        connections = self._waiting.pop(address)
        connection = connections.popleft()
        self._queued.remove(connection)
        if connections:
            self._waiting[address] = connections
        if self._parse_slice(connection):
            self.queue(connection)

    def _schedule(self) -> None:
        """Schedule the next turn, which has its own time."""
        if self._is_scheduled:
            return
        self._is_scheduled = True
        loop = asyncio.get_running_loop()
        if self._left > 0:
            loop.call_soon(self._next_turn)
        else:
            loop.call_later(_PAUSE_SECONDS, self._next_turn)

    def _parse_slice(self, connection: Parsing) -> bool:
        began = self._clock()
        more = connection.parse_slice()
        self._left -= self._clock() - began
        return more
