"""Pages that simulated engines fetch from one another.

Who fetches, asks, serves and holds pages is the real engine's code, and the pages are those that the other engine has
at that time. Modeled is only the way between them: `FetchTime`. An engine sends one page after the other, and one
delivery after the other. That takes none of the time of its steps.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from quire.engine_core.kv_tiers.fetch_times import FetchTimes
from quire.engine_core.kv_tiers.page_server import Delivery
from quire.engine_core.kv_tiers.peers import PeerSet
from quire.engine_core.kv_tiers.tier import Fetch, Key
from quire.protocol.messages import ClientMessage, KvFetch, KvFetched, KvMessage, Ping
from quire.protocol.simulation import FetchTime


class Post(Protocol):
    """Sends a message to the engine of this number, where it arrives at `time`; `wakes`: there will be work to do."""

    def __call__(self, number: int, time: float, client_id: bytes, message: ClientMessage, *, wakes: bool) -> None:
        """See the class."""


@dataclass(slots=True, eq=False)
class _Stream:
    """Pages that are sent one after the other, the first from `begin` on; all `count` have been sent at `end`."""

    begin: float
    page_seconds: float
    count: int
    end: float

    def num_sent(self, time: float) -> int:
        """Return how many pages have been sent by then."""
        if time >= self.end:
            return self.count
        return 0 if time <= self.begin else min(int((time - self.begin) / self.page_seconds), self.count)

    def cut(self, time: float) -> None:
        """End with what has been sent by then."""
        self.count, self.end = self.num_sent(time), min(time, self.end)


class PageNetwork:
    """The engines of a fleet that fetch from one another. Their addresses are their numbers."""

    def __init__(self, time: FetchTime, block_size: int, post: Post) -> None:
        self.lag = time.answer / 2  # of a message on its way
        self.connect_seconds = time.connect
        self.page_seconds = time.token * block_size
        self.block_size = block_size
        self.post = post
        self.exchanges: list[PageExchange] = []  # by number

    def join(self, clock: Callable[[], float]) -> PageExchange:
        """Add the next engine."""
        self.exchanges.append(exchange := PageExchange(self, len(self.exchanges), clock))
        return exchange

    def of(self, client_id: bytes) -> PageExchange:
        """Return the side of the engine that is this client of another."""
        return self.exchanges[int(client_id)]


class PageExchange:
    """One engine's side: the peers from which it fetches, and the server of its own pages."""

    def __init__(self, network: PageNetwork, number: int, clock: Callable[[], float]) -> None:
        self._network = network
        self.number = number
        self.clock = clock
        self.client_id = str(number).encode()
        self.server = SimulatedPageServer(network, self)
        self.peers = PeerSet(self._start)
        self._started: dict[int, SimulatedPeer] = {}  # by number

    def advance(self) -> None:
        """Note what has come and what has been sent until now."""
        for peer in self._started.values():
            peer.advance()
        self.server.advance()

    def answer(self, source: int, fetch_id: int, stream: _Stream) -> None:
        """Take the answer to a fetch from another engine: the pages that come, and when."""
        if self._started[source].answer(fetch_id, stream):
            self._network.post(self.number, stream.end + self._network.lag, b"", Ping(), wakes=True)

    def refuse(self, client_id: bytes, message: KvFetched) -> None:
        """Answer a fetch that is not served."""
        now = self.clock()
        self._network.of(client_id).answer(self.number, message.fetch_id, _Stream(now, 0.0, 0, now))

    def _start(self, address: str) -> SimulatedPeer:
        source = self._network.exchanges[int(address)]
        self._started[source.number] = peer = SimulatedPeer(self._network, self, source)
        return peer


class SimulatedPageServer:
    """Sends pages to other engines in virtual time: a `PageSender`."""

    def __init__(self, network: PageNetwork, own: PageExchange) -> None:
        self._network = network
        self._own = own
        self._open: dict[Delivery, _Stream | None] = {}  # None: the engine has yet to say what it has
        self._num_sent = 0

    @property
    def is_busy(self) -> bool:
        """True while a delivery has not ended."""
        return bool(self._open)

    def open(self, client_id: bytes, fetch_id: int) -> Delivery:
        """Begin a delivery without pages."""
        self._open[delivery := Delivery(client_id, fetch_id)] = None
        return delivery

    def extend(self, delivery: Delivery, pages: Sequence[int]) -> None:
        """Add pages, all that there will be, as nothing is fetched that has yet to be computed."""
        delivery.pages += pages

    def complete(self, delivery: Delivery) -> None:
        """Send the pages after those of all other deliveries."""
        begin = max([self._own.clock(), *(stream.end for stream in self._open.values() if stream is not None)])
        count, page_seconds = len(delivery.pages), self._network.page_seconds
        self._send(delivery, _Stream(begin, page_seconds, count, begin + count * page_seconds))

    def is_stuck(self, _delivery: Delivery) -> bool:
        """Return False: engines take what they are sent."""
        return False

    def cut(self, delivery: Delivery) -> None:
        """End a delivery with what has been sent."""
        self._cut(delivery, self._own.clock())
        self._end(delivery)

    def cancel(self, client_id: bytes, fetch_id: int, time: float) -> None:
        """End a delivery that the other engine has given up, when this one learns of it."""
        for delivery in self._open:
            if (delivery.client_id, delivery.fetch_id) == (client_id, fetch_id):
                self._cut(delivery, time)

    def receive(self, _client_id: bytes, _message: KvMessage) -> None:
        """Take nothing: there are no such messages."""

    def stats(self) -> dict[str, float]:
        """Return counters by name."""
        return {"kv_peer_pages_served": self._num_sent}

    def stop(self) -> bool:
        """Return True: there is no thread."""
        return True

    def advance(self) -> None:
        """End the deliveries whose pages have been sent."""
        now = self._own.clock()
        for delivery in [each for each, stream in self._open.items() if stream is not None and now >= stream.end]:
            self._end(delivery)

    def _send(self, delivery: Delivery, stream: _Stream) -> None:
        delivery.is_complete = True
        self._open[delivery] = stream
        self._network.post(self._own.number, stream.end, b"", Ping(), wakes=False)
        self._network.of(delivery.client_id).answer(self._own.number, delivery.fetch_id, stream)

    def _cut(self, delivery: Delivery, time: float) -> None:
        stream = self._open[delivery] or _Stream(time, 0.0, 0, time)
        stream.cut(time)
        self._send(delivery, stream)

    def _end(self, delivery: Delivery) -> None:
        stream = self._open.pop(delivery)
        self._num_sent += 0 if stream is None else stream.count
        delivery.is_ended = True


@dataclass(slots=True, eq=False)
class _SimulatedFetch:
    fetch: Fetch
    begun: float
    stream: _Stream | None = None  # None: the other engine has not answered yet


class SimulatedPeer:
    """The pages of another engine, as `KvPeer` has them: a tier."""

    def __init__(self, network: PageNetwork, own: PageExchange, source: PageExchange) -> None:
        self._network = network
        self._own = own
        self._source = source
        self._connected = own.clock() + network.connect_seconds
        self._times = FetchTimes(own.clock)
        self._open: dict[int, _SimulatedFetch] = {}  # by id
        self._ids = itertools.count()
        self._num_fetched = 0

    def find(self, keys: Sequence[Key]) -> int:
        """Return how many pages to ask for: none before it is connected, which the first request does not wait for."""
        return len(keys) if self._own.clock() > self._connected else 0

    def touch(self, _keys: Sequence[Key]) -> None:
        """Leave it to the other engine how long it keeps what."""

    def seconds(self, num_pages: int) -> float:
        """Return the likely time of a fetch; 0 if nothing is known."""
        return self._times.seconds(num_pages)

    def fetch(self, fetch: Fetch) -> None:
        """Ask for pages."""
        fetch_id, now, count = next(self._ids), self._own.clock(), len(fetch.keys)
        self._open[fetch_id] = _SimulatedFetch(fetch, now)
        first = (len(fetch.tokens) - 1) // self._network.block_size - count
        message = KvFetch(fetch_id, list(fetch.tokens), fetch.cache_salt, first, count)
        arrival = now + self._network.lag
        self._network.post(self._source.number, arrival, self._own.client_id, message, wakes=False)

    def cancel(self, fetch: Fetch) -> None:
        """Let a fetch end with what has come."""
        now = self._own.clock()
        for fetch_id in [each for each, opened in self._open.items() if opened.fetch is fetch]:
            self._source.server.cancel(self._own.client_id, fetch_id, now + self._network.lag)
            self._end(fetch_id, now)
            self._network.post(self._own.number, now, b"", Ping(), wakes=True)

    def stats(self) -> dict[str, float]:
        """Return counters by name."""
        return {"kv_peer_pages_fetched": self._num_fetched}

    def stop(self) -> bool:
        """Return True: there is no thread."""
        return True

    def answer(self, fetch_id: int, stream: _Stream) -> bool:
        """Expect the pages of a fetch; return False if it has ended."""
        if (opened := self._open.get(fetch_id)) is None:
            return False
        opened.stream = stream
        return True

    def advance(self) -> None:
        """Take the pages that have come, and end the fetches whose last one has."""
        now, lag = self._own.clock(), self._network.lag
        for fetch_id, opened in list(self._open.items()):
            if (stream := opened.stream) is None:
                continue
            end = stream.end + lag
            come = stream.count if now >= end else stream.num_sent(now - lag)
            contents = opened.fetch.contents
            contents += [0] * (come - len(contents))
            if now >= end:
                self._end(fetch_id, end)

    def _end(self, fetch_id: int, time: float) -> None:
        opened = self._open.pop(fetch_id)
        count = len(opened.fetch.contents)
        self._num_fetched += count
        self._times.learn(time - opened.begun, count)
        opened.fetch.done(opened.fetch)
