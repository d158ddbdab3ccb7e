"""The set of KV peers: who is started, who is left, and what the counters say."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

from quire.engine_core.kv_tiers.peers import MAX_PEERS, PeerSet
from quire.engine_core.kv_tiers.tier import Fetch, Key
from quire.protocol.errors import AddressError
from quire.protocol.messages import KvPeers, Ping


class CountingPeer:
    """A tier that has fetched some pages."""

    def __init__(self, address: str) -> None:
        if address == "bad":
            raise AddressError("bad is no address")
        self.stopped = threading.Event()
        self.num_fetched = 3

    def find(self, keys: Sequence[Key]) -> int:
        return len(keys)

    def touch(self, keys: Sequence[Key]) -> None: ...

    def seconds(self, num_pages: int) -> float:
        return float(num_pages)

    def fetch(self, fetch: Fetch) -> None: ...

    def cancel(self, fetch: Fetch) -> None: ...

    def stats(self) -> dict[str, float]:
        return {"kv_peer_connected": 1, "kv_peer_pages_fetched": self.num_fetched}

    def stop(self) -> bool:
        self.stopped.set()
        return True


def test_peers_come_and_go_with_the_clients_that_name_them() -> None:
    peers = PeerSet(CountingPeer)
    assert (list(peers.of("")), list(peers.of("a")), peers.stats()) == ([], [], {})
    peers.receive(b"1", KvPeers(["a", "b"]))
    peers.receive(b"2", KvPeers(["b"]))
    assert peers.stats() == {}  # nobody has asked for pages
    (first,), (second,) = peers.of("a"), peers.of("b")
    assert peers.stats() == {"kv_peer_connected": 2, "kv_peer_pages_fetched": 6}
    peers.receive(b"1", KvPeers(["c"]))
    assert len(peers.of("c")) == 1
    assert isinstance(first, CountingPeer)
    assert first.stopped.wait(10)
    assert (list(peers.of("a")), list(peers.of("b"))) == ([], [second])
    assert peers.stats() == {"kv_peer_connected": 2, "kv_peer_pages_fetched": 9}  # counters do not fall
    peers.forget(b"1")
    peers.forget(b"2")
    assert list(peers.of("b")) == []
    assert peers.stats() == {"kv_peer_connected": 0, "kv_peer_pages_fetched": 9}
    assert peers.stop()


def test_the_given_peer_is_that_of_requests_that_name_none() -> None:
    peers = PeerSet(CountingPeer, "given")
    peers.receive(b"1", KvPeers(["given", "a"]))
    peers.forget(b"1")
    (given,) = peers.of("")
    assert list(peers.of("given")) == [given]
    assert peers.stop()
    assert isinstance(given, CountingPeer)
    assert given.stopped.is_set()


def test_a_useless_address_costs_a_line_and_the_others_nothing(caplog: pytest.LogCaptureFixture) -> None:
    peers = PeerSet(CountingPeer)
    for _ in range(3):
        peers.receive(b"1", KvPeers(["bad", "a"]))
        assert list(peers.of("bad")) == []
    assert len(peers.of("a")) == 1
    assert [record.getMessage() for record in caplog.records] == [
        "KV pages cannot be fetched from bad: bad is no address"
    ]


def test_peers_are_bounded() -> None:
    peers = PeerSet(CountingPeer)
    peers.receive(b"1", KvPeers([str(number) for number in range(100)]))
    assert sum(len(peers.of(str(number))) for number in range(100)) == MAX_PEERS
    assert peers.stats()["kv_peer_connected"] == MAX_PEERS


def test_other_messages_are_left_to_others() -> None:
    assert not PeerSet(CountingPeer).receive(b"1", Ping())
