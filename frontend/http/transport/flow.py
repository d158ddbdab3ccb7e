"""When a connection is read, and when it is closed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from uvicorn.protocols.http.flow_control import FlowControl


class ReadingFlow(FlowControl):
    """Flow control in which waiting input keeps reading paused, whatever the running request asks for."""

    is_held = False

    def hold(self, is_held: bool, is_full: bool) -> None:
        """Pause reading for input that waits, or end that; `is_full`: the running request has enough of its body."""
        self.is_held = is_held
        if is_held:
            self.pause_reading()
        elif not is_full:
            self.resume_reading()

    def pause_reading(self) -> None:
        """Pause, unless the connection is closing."""
        if not self._transport.is_closing():
            super().pause_reading()

    def resume_reading(self) -> None:
        """Read on, unless waiting input holds it."""
        if not (self.is_held or self._transport.is_closing()):
            super().resume_reading()


class ResponseTransport:
    """The transport as one response sees it: closing it waits for the rest of the request."""

    def __init__(self, transport: asyncio.Transport, close: Callable[[], None]) -> None:
        self._transport = transport
        self._close = close

    def write(self, data: bytes) -> None:
        """Write a part of the response."""
        self._transport.write(data)

    def is_closing(self) -> bool:
        """Return True if the connection is being closed."""
        return self._transport.is_closing()

    def close(self) -> None:
        """Close the connection when the rest of the request has come."""
        self._close()
