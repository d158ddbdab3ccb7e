"""The engines from which this one fetches KV pages: the one that it was started with, and those that clients name."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import zmq

from quire.engine_core.feature import Feature
from quire.engine_core.kv_tiers.tier import KvTier
from quire.protocol.errors import AddressError, KeyFileError
from quire.protocol.messages import ClientMessage, KvPeers

MAX_PEERS = 64
"""Engines from which one may fetch at a time; clients that name more get their pages computed here."""

_GAUGE = "kv_peer_connected"  # the others are counters

logger = logging.getLogger(__name__)


class PeerSet(Feature):
    """The peers by address. `start(address)` starts the tier of one; it raises AddressError or KeyFileError.

    A peer that clients name is started when a request first asks for its pages, and has none until it is connected: a
    connection costs threads, descriptors, and at first a checksum of the checkpoint, which most engines never need.
    """

    def __init__(self, start: Callable[[str], KvTier], given: str | None = None) -> None:
        """`given`: the peer of requests that name none, which no client can take away."""
        self._start = start
        self._given = given
        self._named: dict[bytes, frozenset[str]] = {}  # by client
        self._wanted: set[str] = set()  # by any client
        self._peers: dict[str, KvTier] = {}
        self._unusable: set[str] = set()
        self._counts = Counter[str]()  # of peers that are gone
        if given is not None:
            self._peers[given] = start(given)

    def of(self, source: str) -> Sequence[KvTier]:
        """Return the peer at an address, or that which was given; none if there is none."""
        address = source or self._given or ""
        if address in self._wanted and address not in self._peers:
            self._begin(address)
        peer = self._peers.get(address)
        return () if peer is None else (peer,)

    def receive(self, client_id: bytes, message: ClientMessage) -> bool:
        """Take the peers that a client names, in place of those that it has named before."""
        if not isinstance(message, KvPeers):
            return False
        self._named[client_id] = frozenset(message.addresses)
        self._update()
        return True

    def forget(self, client_id: bytes) -> None:
        """Leave the peers that only this client has named."""
        if self._named.pop(client_id, None):
            self._update()

    def stats(self) -> dict[str, float]:
        """Return the sums of what the peers count, also of those that are gone; nothing if there was none."""
        sums = Counter(self._counts)
        for peer in self._peers.values():
            sums.update({name: int(value) for name, value in peer.stats().items()})
        return dict(sums)

    def stop(self) -> bool:
        """Leave all peers."""
        with ThreadPoolExecutor(MAX_PEERS) as pool:  # each may take a while
            return all(list(pool.map(lambda peer: peer.stop(), self._peers.values())))

    def _update(self) -> None:
        """Leave the peers that nobody names any more."""
        self._wanted = {address for named in self._named.values() for address in named}
        self._unusable &= self._wanted
        for address in self._peers.keys() - self._wanted - {self._given}:
            peer = self._peers.pop(address)
            self._counts.update({name: 0 if name == _GAUGE else int(value) for name, value in peer.stats().items()})
            threading.Thread(target=peer.stop, name="quire-kv-peer-end", daemon=True).start()

    def _begin(self, address: str) -> None:
        """Start a peer, unless there are too many, or it cannot be used."""
        if len(self._peers) >= MAX_PEERS or address in self._unusable:
            return
        try:
            self._peers[address] = self._start(address)
        except (AddressError, KeyFileError, zmq.ZMQError, OSError) as error:  # or there are no more descriptors
            self._unusable.add(address)
            logger.warning("KV pages cannot be fetched from %s: %s", address, error)
