"""ROUTER and DEALER sockets on a virtual network: as ZeroMQ, it loses and reorders nothing within a connection."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial

from fault_simulation.world import Process, Thread, World, current_thread
from quire.engine_core.transport.clients import ClientId, Sent
from quire.frontend.errors import EngineConnectionError
from quire.protocol.codec import ClientDecoder, Frame
from quire.protocol.messages import EngineMessage

_RECONNECT_SECONDS = 0.1  # after which libzmq tries again by itself
_NOTICE_SECONDS = 0.05  # until the end of a connection is known, at most


class Network:
    """All sockets, by address. A connection takes `capacity` frames to a client that does not read."""

    def __init__(self, world: World, *, delay: float, capacity: int) -> None:
        """`delay`: seconds that a frame travels, at most."""
        self.world = world
        self.delay = delay
        self.capacity = capacity
        self.routers: dict[str, Router] = {}
        self.stalled_until: dict[Process, float] = {}  # by client
        self._num_links = 0

    def travel(self) -> float:
        """Return how long a frame travels."""
        return self.delay * self.world.random.random() ** 3

    def connect(self, connection: Dealer) -> Link | None:
        """Return a connection to whoever listens at the address."""
        router = self.routers.get(connection.address)
        if router is None:
            return None
        self._num_links += 1
        link = Link(self, b"\0" + self._num_links.to_bytes(4, "big"), connection, router)
        router.links[link.id] = link
        return link


class Link:
    """One connection. Frames of each direction arrive in order; those that arrive after its end are lost."""

    def __init__(self, network: Network, link_id: ClientId, dealer: Dealer, router: Router) -> None:
        self.id = link_id
        self.num_to_client = 0  # that the client has not read
        self._network = network
        self._dealer = dealer
        self._router = router
        self._end = float("inf")
        self._last_to_engine = self._last_to_client = 0.0

    @property
    def is_open(self) -> bool:
        """True until an end is in sight."""
        return self._end == float("inf")

    def to_engine(self, frames: list[bytes]) -> None:
        """Send frames of the client."""
        self._last_to_engine = when = self._arrival(self._last_to_engine)
        self._network.world.at(when, partial(self._reach_engine, when, frames))

    def to_client(self, frames: list[bytes]) -> None:
        """Send frames of the engine."""
        self.num_to_client += 1
        self._last_to_client = when = self._arrival(self._last_to_client)
        self._network.world.at(when, partial(self._reach_client, when, frames))

    def cut(self, *, after_all: bool = False) -> None:
        """End it: frames that are on their way arrive up to some moment, or all of them."""
        if not self.is_open:
            return
        world = self._network.world
        end = world.now + _NOTICE_SECONDS * world.random.random()
        self._end = max(end, self._last_to_client, self._last_to_engine) if after_all else end
        world.at(self._end, self._close)

    def _arrival(self, last: float) -> float:
        network = self._network
        stalled = network.stalled_until.get(self._dealer.process, 0.0)
        return max(last, stalled, network.world.now + network.travel())

    def _reach_engine(self, when: float, frames: list[bytes]) -> None:
        if when <= self._end and self._router.process.is_alive:
            self._router.arrive(self.id, frames)

    def _reach_client(self, when: float, frames: list[bytes]) -> None:
        if when <= self._end:
            self._dealer.arrive(self, frames)

    def _close(self) -> None:
        self._router.links.pop(self.id, None)
        if not self._dealer.process.is_alive:
            self._router.on_gone(self.id)
        self._dealer.lose(self)


class Router:
    """The engine's socket."""

    def __init__(self, network: Network, process: Process, address: str) -> None:
        self.process = process
        self.links: dict[ClientId, Link] = {}
        self.arrived: deque[tuple[ClientId, list[bytes]]] = deque()
        self._network = network
        self._address = address
        network.routers[address] = self
        process.on_death.append(partial(self.close, after_all=False))
        self.on_readable: Callable[[], None] = lambda: None
        self.on_gone: Callable[[ClientId], None] = lambda _client_id: None  # with its process

    def transmit(self, client_id: ClientId, frames: list[Frame]) -> Sent:
        """Send the frames of a message, as `send_multipart` does."""
        self.process.burn()
        link = self.links.get(client_id)
        if link is None:
            return Sent.GONE
        if link.num_to_client >= self._network.capacity:
            return Sent.FULL
        if link.is_open:
            link.to_client([bytes(frame) for frame in frames])
        return Sent.YES

    def arrive(self, client_id: ClientId, frames: list[bytes]) -> None:
        """Take frames off the network."""
        self.arrived.append((client_id, frames))
        self.on_readable()

    def close(self, *, after_all: bool) -> None:
        """End all connections."""
        if self._network.routers.get(self._address) is self:
            del self._network.routers[self._address]
        for link in list(self.links.values()):
            link.cut(after_all=after_all)


class Dealer:
    """A client's socket: what `Connection` does on a real one."""

    def __init__(self, network: Network, process: Process, address: str) -> None:
        self.address = address
        self.process = process
        self._network = network
        self._decoder = ClientDecoder()
        self._outbox: deque[list[bytes]] = deque()
        self._arrived: deque[tuple[Link, list[bytes]]] = deque()
        self._link: Link | None = None
        self._news: str | None = None  # of its monitor
        self._lost: str | None = None
        self._is_woken = self._is_closed = False
        self._waiting: Thread | None = None
        process.on_death.append(self._die)
        network.world.at(network.world.now + network.travel(), self._connect)

    def post(self, frames: list[Frame]) -> None:
        self.process.burn()
        assert not self._is_closed
        self._outbox.append([bytes(frame) for frame in frames])
        self.wake()

    def wake(self) -> None:
        self._is_woken = True
        self._notify()

    def exchange(self, timeout: float) -> list[EngineMessage]:
        assert not self._is_closed
        if self._lost is not None:
            raise EngineConnectionError(self._lost)
        self._flush()
        if not (self._is_woken or self._arrived or self._news):
            self._waiting = current_thread()
            self._waiting.wait(timeout)
            self._waiting = None
        self._is_woken = False
        self._lost = self._news
        return self._receive()

    def close(self) -> None:
        if self._lost is None:
            self._flush()
        self._is_closed = True
        self.process.on_death.remove(self._die)
        if self._link is not None:
            self._link.cut(after_all=True)

    def arrive(self, link: Link, frames: list[bytes]) -> None:
        """Take frames off the network."""
        if self._is_closed:
            return
        self._arrived.append((link, frames))
        self._notify()

    def lose(self, link: Link) -> None:
        """Learn that a connection has ended."""
        if link is not self._link or self._is_closed:
            return
        self._link = None
        self._report("the engine has gone: it closed the connection")
        self._network.world.at(self._network.world.now + _RECONNECT_SECONDS, self._connect)

    def cut(self) -> None:
        """Lose the connection."""
        if self._link is not None:
            self._link.cut()

    def _connect(self) -> None:
        if self._is_closed:
            return
        world, stalled = self._network.world, self._network.stalled_until.get(self.process, 0.0)
        if world.now < stalled:
            world.at(stalled, self._connect)
            return
        self._link = self._network.connect(self)
        if self._link is None:
            self._report("no engine listens there")
            world.at(world.now + _RECONNECT_SECONDS, self._connect)
        elif self._lost is None:
            self.wake()  # libzmq sends what was queued by itself

    def _report(self, news: str) -> None:
        self._news = self._news or news
        self._notify()

    def _flush(self) -> None:
        while self._outbox and self._link is not None:
            self._link.to_engine(self._outbox.popleft())

    def _receive(self) -> list[EngineMessage]:
        messages = []
        while self._arrived:
            link, frames = self._arrived.popleft()
            link.num_to_client -= 1
            messages.append(self._decoder.decode(frames))
        return messages

    def _notify(self) -> None:
        if self._waiting is not None:
            self._waiting.wake()

    def _die(self) -> None:
        self._is_closed = True
        if self._link is not None:
            self._link.cut()
