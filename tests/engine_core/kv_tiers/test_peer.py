"""The peer tier beside a peer that damages pages, says nonsense, falls silent, hangs or leaves."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
import pytest
import zmq
from patience import PATIENCE

from quire.engine_core.kv_tiers.peer import KvPeer
from quire.engine_core.kv_tiers.tier import Fetch
from quire.protocol.address import default_address, remove_address
from quire.protocol.codec import EngineDecoder, encode
from quire.protocol.keys import NO_KEYS
from quire.protocol.messages import (
    PROTOCOL_VERSION,
    ClientMessage,
    EngineGoodbye,
    EngineMessage,
    ErrorMessage,
    Hello,
    KvAck,
    KvCancel,
    KvFetch,
    KvFetched,
    KvHello,
    KvPage,
    KvWelcome,
    Pong,
    Ready,
)
from quire.protocol.sockets import bind_engine

SIZE = 4
TOKENS = list(range(5 * SIZE + 1))
NEVER = 1e6


class Memory:
    """KV memory of pages of two bytes, whose checksum is their sum."""

    def __init__(self) -> None:
        self.pages: dict[int, bytes] = {}

    def fill_page(self, page: int, copy: npt.NDArray[np.uint8]) -> int:
        if len(copy) != 2:
            raise ValueError("a copy has 2 bytes")
        self.pages[page] = copy.tobytes()
        return int(copy.sum())

    def kv_format(self) -> str:
        return "format"


class FakePeer:
    """An engine's socket, with the answers of the test."""

    def __init__(self) -> None:
        self.address = default_address()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._router = bind_engine(self._context, self.address)
        self._router.rcvtimeo = int(1000 * PATIENCE)
        self._client = b""

    def receive(self) -> ClientMessage:
        self._client, *frames = self._router.recv_multipart()
        return EngineDecoder().decode(frames)

    def expect(self, kind: type[ClientMessage]) -> ClientMessage:
        """The next message of a kind."""
        while not isinstance(message := self.receive(), kind):
            pass
        return message

    def send(self, message: EngineMessage) -> None:
        self._router.send_multipart([self._client, *encode(message)])

    def greet(self, kv_format: str = "format", heartbeat: float = NEVER) -> None:
        self.expect(Hello)
        self.send(Ready(PROTOCOL_VERSION, "demo", "", 4096, 8192, 100, SIZE, 256, 1, heartbeat))
        self.expect(KvHello)
        self.send(KvWelcome(kv_format))

    def close(self) -> None:
        self._context.destroy(linger=0)
        remove_address(self.address)


class Pair:
    """The tier and the peer."""

    def __init__(self) -> None:
        self.memory, self.peer = Memory(), FakePeer()
        self.tier = KvPeer(self.peer.address, NO_KEYS, self.memory, SIZE)
        self.tier.start()
        self.done: queue.SimpleQueue[Fetch] = queue.SimpleQueue()

    def wait(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < deadline
            threading.Event().wait(0.001)

    def wait_for(self, count: int) -> None:
        """Wait until the tier has so many pages of any prefix, or none with 0."""
        self.wait(lambda: (self.tier.find([b"key"] * 3) == 3) is (count > 0))

    def fetch(self, num_pages: int = 3) -> Fetch:
        """Begin to fetch the last pages of a prefix."""
        self.wait_for(1)
        fetch = Fetch([bytes([i]) for i in range(num_pages)], list(range(10, 10 + num_pages)), self.done.put, TOKENS)
        self.tier.fetch(fetch)
        return fetch

    @property
    def failures(self) -> float:
        return self.tier.stats()["kv_peer_failures"]


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    assert made.tier.stop()
    made.peer.close()


def page(fetch_id: int, content: int) -> KvPage:
    return KvPage(fetch_id, content, bytes([content, 0]))


def test_pages_are_filled_in_order_and_acknowledged(pair: Pair) -> None:
    pair.peer.greet()
    fetch = pair.fetch()
    assert pair.peer.expect(KvFetch) == KvFetch(0, TOKENS, "", 2, 3)
    pair.peer.send(page(0, 7))
    assert pair.peer.expect(KvAck) == KvAck(0, 1)
    pair.peer.send(page(0, 8))
    assert pair.peer.expect(KvAck) == KvAck(0, 2)
    pair.peer.send(page(0, 9))
    assert pair.done.get(timeout=PATIENCE) is fetch
    assert fetch.contents == [7, 8, 9]
    assert pair.memory.pages == {10: b"\7\0", 11: b"\10\0", 12: b"\11\0"}
    assert (pair.tier.stats()["kv_peer_pages_fetched"], pair.failures) == (3, 0)


def test_a_damaged_page_ends_a_fetch(pair: Pair) -> None:
    pair.peer.greet()
    fetch = pair.fetch()
    pair.peer.expect(KvFetch)
    pair.peer.send(page(0, 7))
    pair.peer.send(KvPage(0, 8, b"\1\2"))
    assert pair.done.get(timeout=PATIENCE).contents == [7]
    assert pair.peer.expect(KvCancel) == KvCancel(0)
    pair.peer.send(page(0, 9))  # it was on its way
    pair.fetch()
    assert pair.peer.expect(KvFetch) == KvFetch(1, TOKENS, "", 2, 3)
    assert (fetch.contents, pair.failures) == ([7], 1)


@pytest.mark.parametrize(
    "nonsense",
    [KvPage(0, 1, b"short of nothing"), EngineGoodbye("bye"), ErrorMessage("say Hello first", fatal=True)],
    ids=lambda message: type(message).__name__,
)
def test_a_peer_that_makes_no_sense_or_leaves_is_found_again(pair: Pair, nonsense: EngineMessage) -> None:
    pair.peer.greet()
    pair.fetch()
    pair.peer.expect(KvFetch)
    pair.peer.send(page(0, 7))
    pair.peer.send(nonsense)
    assert pair.done.get(timeout=PATIENCE).contents == [7]
    pair.wait_for(0)
    assert pair.failures == 1
    pair.peer.greet()
    pair.fetch()
    assert isinstance(pair.peer.expect(KvFetch), KvFetch)


def test_a_silent_peer_is_lost(pair: Pair) -> None:
    pair.peer.greet(heartbeat=0.02)
    pair.fetch()
    assert pair.done.get(timeout=PATIENCE).contents == []
    pair.wait_for(0)


def test_a_peer_that_hangs_is_not_asked_until_it_steps_again(pair: Pair) -> None:
    pair.peer.greet()
    pair.fetch()
    pair.peer.expect(KvFetch)
    pair.peer.send(Pong(29.0))
    pair.peer.send(page(0, 7))
    pair.peer.send(Pong(31.0))
    assert pair.done.get(timeout=PATIENCE).contents == [7]
    assert isinstance(pair.peer.expect(KvCancel), KvCancel)
    pair.wait_for(0)
    pair.peer.send(Pong(0.0))
    pair.wait_for(1)


def test_a_peer_with_other_kv_is_left_alone(pair: Pair) -> None:
    pair.peer.greet("another format")
    pair.wait(lambda: pair.failures == 1)
    assert pair.tier.find([b"key"]) == 0


def test_a_fetch_that_nobody_waits_for_ends(pair: Pair) -> None:
    pair.peer.greet()
    fetch = pair.fetch()
    pair.peer.expect(KvFetch)
    pair.tier.cancel(fetch)
    assert pair.done.get(timeout=PATIENCE).contents == []
    assert pair.peer.expect(KvCancel) == KvCancel(0)
    pair.tier.cancel(fetch)
    assert pair.failures == 0


def test_an_error_of_the_peer_ends_a_fetch(pair: Pair) -> None:
    pair.peer.greet()
    pair.fetch()
    pair.peer.expect(KvFetch)
    pair.peer.send(KvFetched(0, "too many"))
    assert pair.done.get(timeout=PATIENCE).contents == []
    assert pair.failures == 1


def test_fetches_end_with_the_tier() -> None:
    pair = Pair()
    pair.peer.greet()
    pair.fetch()
    pair.peer.expect(KvFetch)
    assert pair.tier.stop()
    assert pair.done.get(timeout=PATIENCE).contents == []
    pair.peer.close()


def test_what_misses_cost_is_learned(pair: Pair) -> None:
    pair.peer.greet()
    assert pair.tier.seconds(3) == 0.0
    pair.fetch()
    pair.peer.expect(KvFetch)
    pair.peer.send(KvFetched(0))
    pair.done.get(timeout=PATIENCE)
    assert pair.tier.seconds(1) > 0.0
