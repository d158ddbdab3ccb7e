"""The thread of an engine's socket: what `EngineServer` does on a real one."""

from __future__ import annotations

from collections import deque

from fault_simulation.network import Network, Router
from fault_simulation.world import Inbox, Process, sleep
from quire.engine_core.transport.access import OWNER
from quire.engine_core.transport.clients import ClientId, ClientLimits, ServerCounters
from quire.engine_core.transport.sessions import ClientSessions, EngineCallbacks
from quire.protocol.messages import EngineCoreOutputs, EngineGoodbye, EngineMessage, Ready

ADDRESS = "ipc:///simulated"
_RETRY_SECONDS = 0.05


class Server:
    """Sessions over a router."""

    def __init__(self, process: Process, network: Network, inbox: Inbox, ready: Ready, max_waiting_bytes: int) -> None:
        self.last_step = process.world.now
        self.failure: BaseException | None = None
        self.counters = ServerCounters()
        self._process = process
        self._network = network
        self._inbox = inbox
        self._ready = ready
        self._limits = ClientLimits(max_clients=1000, max_waiting_bytes=max_waiting_bytes)
        self._outgoing: deque[tuple[ClientId, EngineMessage]] = deque()
        self._ended: dict[tuple[ClientId, str], None] = {}
        self._is_awake = False
        self._timer = float("inf")

    def start(self, engine: EngineCallbacks) -> None:
        self.router = Router(self._network, self._process, ADDRESS)
        self.router.on_readable = self._wake
        self._sessions = ClientSessions(
            self._ready,
            self._inbox.put,
            engine,
            transmit=self.router.transmit,
            step_age=lambda now: max(0.0, now - self.last_step),
            counters=self.counters,
            limits=self._limits,
        )

    def send(self, client_id: ClientId, message: EngineMessage) -> None:
        self._process.burn()
        if isinstance(message, EngineCoreOutputs):
            self._check_ends(client_id, message)
        self._outgoing.append((client_id, message))
        self._wake()

    def stop(self, *, gives_way: bool = False) -> None:
        """Say goodbye, and let all that was sent arrive."""
        self._send_outgoing()
        self._sessions.say_goodbye(EngineGoodbye("the engine ends", gives_way=gives_way))
        sleep(0.05)
        self._sessions.flush()
        self.router.close(after_all=True)

    def _check_ends(self, client_id: ClientId, message: EngineCoreOutputs) -> None:
        """Check that nothing follows the terminal output of a request."""
        for output in message.outputs:
            if (client_id, output.request_id) in self._ended:
                self._process.world.fail(f"an output of {output.request_id} after its terminal one")
            if output.finish_reason is not None:
                self._ended[client_id, output.request_id] = None

    def _wake(self) -> None:
        if not self._is_awake:
            self._is_awake = True
            self._process.soon(self._turn)

    def _turn(self) -> None:
        self._is_awake = False
        sessions, router, world = self._sessions, self.router, self._process.world
        sessions.flush()
        self._send_outgoing()
        for _ in range(len(router.arrived)):
            client_id, frames = router.arrived.popleft()
            self._process.burn()
            sessions.receive(client_id, frames, lambda: OWNER, world.now)
        if world.now >= sessions.next_beat:
            sessions.beat(world.now)
        due = min(sessions.next_beat, world.now + _RETRY_SECONDS if sessions.blocked else float("inf"))
        if due < self._timer or self._timer <= world.now:
            self._timer = due
            if due < float("inf"):
                world.at(due, self._turn, self._process)

    def _send_outgoing(self) -> None:
        for _ in range(len(self._outgoing)):
            self._sessions.send(*self._outgoing.popleft())
