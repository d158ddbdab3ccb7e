"""The page server sends no more than clients take, lets them take turns, and gives pages back when it is told to."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest
from patience import PATIENCE

from quire.engine_core.kv_tiers import page_server
from quire.engine_core.kv_tiers.page_server import Delivery, PageServer
from quire.protocol.messages import EngineMessage, KvAck, KvCancel, KvFetched, KvHello, KvPage, KvWelcome

WINDOW = 16


class Copier:
    """Pages of one byte, their number. Copies wait while `may_copy` is not set."""

    page_bytes = 1

    def __init__(self) -> None:
        self.may_copy = threading.Event()
        self.may_copy.set()
        self.is_copying = threading.Event()

    def copy_page(self, page: int, copy: npt.NDArray[np.uint8]) -> int:
        self.is_copying.set()
        assert self.may_copy.wait(PATIENCE)
        if page > 255:
            raise ValueError("there is no such page")
        copy[0] = page
        return page

    def kv_format(self) -> str:
        return "format"


class Harness:
    def __init__(self) -> None:
        self.copier = Copier()
        self.sent: queue.SimpleQueue[tuple[bytes, EngineMessage]] = queue.SimpleQueue()
        self.wakes: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.server = PageServer(self.copier, lambda *sent: self.sent.put(sent), lambda: self.wakes.put(None))
        self.server.start()

    def open(self, num_pages: int, client_id: bytes = b"client") -> Delivery:
        """A delivery of the pages 0, 1, ..."""
        delivery = self.server.open(client_id, 1)
        self.server.extend(delivery, range(num_pages))
        return delivery

    def pages(self, count: int) -> list[tuple[bytes, int]]:
        """The next pages that are sent, and to whom."""
        found = []
        for _ in range(count):
            client_id, message = self.sent.get(timeout=PATIENCE)
            assert isinstance(message, KvPage)
            assert message.data[0] == message.checksum
            found.append((client_id, message.checksum))
        return found

    def end(self, delivery: Delivery) -> None:
        """The end, which comes next."""
        assert self.sent.get(timeout=PATIENCE) == (delivery.client_id, KvFetched(1, count=delivery.num_all))
        self.wakes.get(timeout=PATIENCE)
        assert delivery.is_ended

    def nothing(self) -> None:
        """Nothing is sent before a greeting that comes now."""
        self.server.receive(b"other", KvHello())
        assert self.sent.get(timeout=PATIENCE) == (b"other", KvWelcome("format"))


@pytest.fixture
def harness() -> Iterator[Harness]:
    made = Harness()
    yield made
    made.copier.may_copy.set()
    assert made.server.stop()


def test_pages_are_sent_as_they_are_taken(harness: Harness) -> None:
    delivery = harness.open(40)
    assert harness.pages(WINDOW) == [(b"client", page) for page in range(WINDOW)]
    harness.nothing()
    harness.server.receive(b"client", KvAck(1, 3))
    assert harness.pages(3) == [(b"client", page) for page in range(WINDOW, WINDOW + 3)]
    harness.server.receive(b"client", KvAck(1, 10**9))  # no more than it was sent
    assert len(harness.pages(WINDOW)) == WINDOW
    harness.server.receive(b"client", KvAck(1, 35))
    assert harness.pages(5)[-1] == (b"client", 39)
    harness.nothing()
    harness.server.extend(delivery, [7])
    assert harness.pages(1) == [(b"client", 7)]
    harness.server.complete(delivery)
    harness.end(delivery)
    assert harness.server.stats() == {"kv_peer_pages_served": 41}


def test_clients_take_turns(harness: Harness) -> None:
    harness.copier.may_copy.clear()
    one, other = harness.open(8), harness.open(8, b"other")
    harness.copier.may_copy.set()
    sent = harness.pages(16)
    assert sorted(sent[:4]) == [(b"client", 0), (b"client", 1), (b"other", 0), (b"other", 1)]
    for delivery in (one, other):
        harness.server.complete(delivery)
        harness.end(delivery)


def test_a_page_is_copied_to_its_end_before_it_is_given_back(harness: Harness) -> None:
    harness.copier.may_copy.clear()
    delivery = harness.open(8)
    assert harness.copier.is_copying.wait(PATIENCE)
    cut = threading.Thread(target=harness.server.cut, args=[delivery])
    cut.start()
    assert cut.is_alive()
    harness.copier.may_copy.set()
    cut.join(PATIENCE)
    assert delivery.is_ended
    sent = []
    while not isinstance(message := harness.sent.get(timeout=PATIENCE)[1], KvFetched):
        sent.append(message)
    assert len(sent) == delivery.num_sent
    harness.nothing()


def test_a_client_gives_up(harness: Harness) -> None:
    delivery = harness.open(40)
    harness.pages(WINDOW)
    harness.server.receive(b"client", KvCancel(1))
    harness.end(delivery)
    harness.server.extend(delivery, [1])
    harness.nothing()


def test_a_page_that_cannot_be_copied_ends_a_delivery(harness: Harness) -> None:
    delivery = harness.open(2)
    harness.server.extend(delivery, [256, 3])
    harness.pages(2)
    harness.end(delivery)
    again = harness.open(1)
    harness.pages(1)
    harness.server.cut(again)
    harness.end(again)


def test_a_client_that_takes_nothing_is_stuck(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_server, "_PATIENCE_SECONDS", 0.0)
    delivery = harness.open(40)
    harness.pages(WINDOW)
    harness.nothing()
    assert harness.server.is_stuck(delivery)
    harness.server.receive(b"client", KvAck(1, WINDOW))
    harness.pages(WINDOW)
    harness.server.receive(b"client", KvAck(1, 40))
    harness.pages(40 - 2 * WINDOW)
    harness.nothing()
    assert not harness.server.is_stuck(delivery)  # it has all, and more may come
    harness.server.cut(delivery)
    harness.end(delivery)


def test_an_id_that_is_in_use_is_rejected(harness: Harness) -> None:
    delivery = harness.open(0)
    with pytest.raises(ValueError, match="fetch_id 1 is in use"):
        harness.open(0)
    harness.server.cut(delivery)
    harness.end(delivery)
