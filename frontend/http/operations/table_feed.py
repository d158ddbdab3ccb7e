"""Tables beside the live view of an engine, which all viewers of a model share."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod

import msgspec

from quire.frontend.http.transport.sse import event

PERIOD = 0.5  # seconds between two tables


class Updates:
    """Wakes up all tasks that wait for news."""

    def __init__(self) -> None:
        self._next = asyncio.Event()

    @property
    def next(self) -> asyncio.Event:
        """The event that the next news sets."""
        return self._next

    def notify(self) -> None:
        """Wake up the tasks that wait."""
        updated, self._next = self._next, asyncio.Event()
        updated.set()


class TableFeed(ABC):
    """The latest table as an event, for any number of viewers; b"" while there has been nothing to show.

    While there are viewers, one task makes a table every `PERIOD` seconds. All methods run on one event loop.
    """

    kind = ""
    """The name of the event."""

    def __init__(self, updates: Updates) -> None:
        """Notify `updates` of each new table."""
        self._updates = updates
        self._viewers = 0
        self._poller: asyncio.Task[None] | None = None
        self.event = b""

    def join(self) -> None:
        """Note one more viewer."""
        self._viewers += 1
        if self._poller is None:
            self.event = b""
            self._poller = asyncio.create_task(self._poll(), name=f"quire-table-of-{self.kind}")

    def leave(self) -> None:
        """Note that a viewer has left."""
        self._viewers -= 1
        if self._viewers == 0 and self._poller is not None:
            self._poller.cancel()
            self._poller = None

    @abstractmethod
    def has_rows(self) -> bool:
        """Return whether there is something to show. A table that has been shown goes on without."""

    @abstractmethod
    async def table(self) -> msgspec.Struct:
        """Return the table as it is now."""

    async def _poll(self) -> None:
        while True:
            if self.event or self.has_rows():
                self._publish(await self.table())
            await asyncio.sleep(PERIOD)

    def _publish(self, table: msgspec.Struct) -> None:
        made = event(msgspec.json.encode(table), self.kind)
        if made != self.event:
            self.event = made
            self._updates.notify()
