"""The page server: the pages that other engines fetch from this one, on their way out.

The step loop says which pages (`ServedPrefixes`), and holds them until they are sent. A thread copies them out of KV
memory, without the GIL, and hands them to the socket. It goes no further than the other side can take, so that little
of a long prefix is in memory twice, and the outputs of other clients find the socket free.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from quire.protocol.messages import EngineMessage, KvAck, KvFetched, KvHello, KvMessage, KvPage, KvWelcome

_WINDOW_BYTES = 16 << 20  # of a fetch, sent and not acknowledged; two pages at least
_MOST_PAGES = 16  # the same
_MOST_BYTES = 64 << 20  # of all fetches
_PATIENCE_SECONDS = 30.0
_STOP_SECONDS = 2.0

logger = logging.getLogger(__name__)


class PageCopier(Protocol):
    """Copies pages of KV memory: see `Runner`."""

    @property
    def page_bytes(self) -> int:
        """Bytes of a page."""

    def copy_page(self, page: int, copy: npt.NDArray[np.uint8]) -> int:
        """Copy a page that does not change meanwhile; return its checksum."""

    def kv_format(self) -> str:
        """Return a hash of all that the bits of KV depend on besides tokens. It may take seconds."""


@dataclass(eq=False)
class Delivery:
    """Pages on their way to a client; the lock of the server guards it."""

    client_id: bytes
    fetch_id: int
    pages: list[int] = field(default_factory=list)
    num_all: int = 0  # pages that were to be sent
    num_sent: int = 0
    num_taken: int = 0  # pages that the client has acknowledged
    is_complete: bool = False  # no more pages follow
    last_progress: float = field(default_factory=time.monotonic)
    is_ended: bool = False  # nothing is sent or copied any more


class PageSender(Protocol):
    """Sends the pages of deliveries: see `PageServer`."""

    def open(self, client_id: bytes, fetch_id: int) -> Delivery:
        """Begin a delivery without pages. Raises ValueError if the client has one with this id."""

    def extend(self, delivery: Delivery, pages: Sequence[int]) -> None:
        """Add pages, which nobody writes until the delivery has ended."""

    def complete(self, delivery: Delivery) -> None:
        """Note that no more pages follow: the delivery ends when all are sent."""

    def is_stuck(self, delivery: Delivery) -> bool:
        """Return True if the client has not acknowledged what it was sent for a long time."""

    def cut(self, delivery: Delivery) -> None:
        """End a delivery with what has been sent: its pages are free when this returns."""

    def receive(self, client_id: bytes, message: KvMessage) -> None:
        """Take a message of another engine."""

    def stats(self) -> dict[str, float]:
        """Return counters by name."""

    def stop(self) -> bool:
        """End in the middle of what is sent; return False if that fails."""


class PageServer:
    """Sends pages by `send(client_id, message)`. `wake` is called when a delivery has ended. Thread-safe."""

    def __init__(
        self, copier: PageCopier, send: Callable[[bytes, EngineMessage], None], wake: Callable[[], None]
    ) -> None:
        self._copier = copier
        self._send = send
        self._wake = wake
        self._window = min(max(2, _WINDOW_BYTES // copier.page_bytes), _MOST_PAGES)
        self._most = max(2, _MOST_BYTES // copier.page_bytes)
        self._lock = threading.Condition()
        self._open: dict[tuple[bytes, int], Delivery] = {}  # the one that is next to send comes first
        self._greetings: dict[bytes, None] = {}  # clients that wait for a KvWelcome
        self._format: str | None = None
        self._copying: Delivery | None = None
        self._num_sent = 0
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="quire-page-server", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> bool:
        """End the thread, in the middle of what it sends; return False if it can't be ended."""
        with self._lock:
            self._is_stopping = True
            self._lock.notify_all()
        self._thread.join(_STOP_SECONDS)
        return not self._thread.is_alive()

    def stats(self) -> dict[str, float]:
        """Return counters by name."""
        return {"kv_peer_pages_served": self._num_sent}

    # On the step loop

    def open(self, client_id: bytes, fetch_id: int) -> Delivery:
        """Begin a delivery without pages. Raises ValueError if the client has one with this id."""
        delivery = Delivery(client_id, fetch_id)
        with self._lock:
            if (client_id, fetch_id) in self._open:
                raise ValueError(f"fetch_id {fetch_id} is in use by a fetch that has not ended; choose another id")
            self._open[client_id, fetch_id] = delivery
        return delivery

    def extend(self, delivery: Delivery, pages: Sequence[int]) -> None:
        """Add pages, which nobody writes until the delivery has ended."""
        with self._lock:
            if not delivery.is_complete:  # the client may have given it up just now
                delivery.pages += pages
                delivery.num_all += len(pages)
            self._lock.notify_all()

    def complete(self, delivery: Delivery) -> None:
        """Note that no more pages follow: the delivery ends when all are sent."""
        with self._lock:
            delivery.is_complete = True
            self._lock.notify_all()

    def is_stuck(self, delivery: Delivery) -> bool:
        """Return True if the client has not acknowledged what it was sent for a long time."""
        is_waiting = delivery.num_sent > delivery.num_taken and delivery.num_sent < len(delivery.pages)
        return is_waiting and time.monotonic() - delivery.last_progress > _PATIENCE_SECONDS

    def cut(self, delivery: Delivery) -> None:
        """End a delivery with what has been sent: its pages are free when this returns."""
        with self._lock:
            self._lock.wait_for(lambda: self._copying is not delivery)
            if not delivery.is_ended:
                self._end(delivery)

    # On the socket's thread

    def receive(self, client_id: bytes, message: KvMessage) -> None:
        """Take a message of another engine."""
        with self._lock:
            if isinstance(message, KvHello):
                self._greetings[client_id] = None
            elif (delivery := self._open.get((client_id, message.fetch_id))) is None:
                return  # it has ended
            elif isinstance(message, KvAck):
                delivery.num_taken = min(max(delivery.num_taken, message.count), delivery.num_sent)
                delivery.last_progress = time.monotonic()
            else:
                self._shorten(delivery)
            self._lock.notify_all()

    # On the thread

    def _run(self) -> None:
        while True:
            with self._lock:
                self._lock.wait_for(lambda: self._is_stopping or self._greetings or self._next() is not None)
                if self._is_stopping:
                    return
                greetings, self._greetings = self._greetings, {}
                delivery = None if greetings else self._next()
                page = None if delivery is None else self._begin(delivery)
            for client_id in greetings:
                self._greet(client_id)
            if delivery is not None and page is not None:
                self._copy(delivery, page)

    def _next(self) -> Delivery | None:
        """Return a delivery that can send a page, or can end."""
        in_flight = sum(each.num_sent - each.num_taken for each in self._open.values())
        for each in self._open.values():
            if each.num_sent == len(each.pages):
                if each.is_complete:
                    return each
            elif each.num_sent - each.num_taken < self._window and in_flight < self._most:
                return each
        return None

    def _begin(self, delivery: Delivery) -> int | None:
        """Return the page to send next, which is being copied from now on; or end the delivery. The lock is held."""
        if delivery.num_sent == len(delivery.pages):
            self._end(delivery)
            return None
        self._copying = delivery
        return delivery.pages[delivery.num_sent]

    def _copy(self, delivery: Delivery, page: int) -> None:
        """Send a page, and let other deliveries have their turn."""
        copy = np.empty(self._copier.page_bytes, np.uint8)
        is_sent = False
        try:
            checksum = self._copier.copy_page(page, copy)
            self._send(delivery.client_id, KvPage(delivery.fetch_id, checksum, copy))
            is_sent = True
        except Exception:
            logger.exception("page %d can't be sent", page)
        with self._lock:
            self._copying = None
            delivery.num_sent += is_sent
            self._num_sent += is_sent
            delivery.last_progress = time.monotonic()
            if not is_sent:
                self._shorten(delivery)
            key = delivery.client_id, delivery.fetch_id
            self._open[key] = self._open.pop(key)
            self._lock.notify_all()

    def _shorten(self, delivery: Delivery) -> None:
        """Let a delivery end with what has been sent. The lock is held."""
        delivery.is_complete = True
        del delivery.pages[delivery.num_sent + (self._copying is delivery) :]

    def _end(self, delivery: Delivery) -> None:
        """End a delivery. The lock is held."""
        delivery.is_ended = True
        del self._open[delivery.client_id, delivery.fetch_id]
        self._send(delivery.client_id, KvFetched(delivery.fetch_id, count=delivery.num_all))
        self._wake()

    def _greet(self, client_id: bytes) -> None:
        try:
            self._format = self._format or self._copier.kv_format()
        except Exception:  # the checkpoint may be gone, for one
            logger.exception("the format of KV pages is unknown; other engines can't fetch them")
        self._send(client_id, KvWelcome(self._format or ""))
