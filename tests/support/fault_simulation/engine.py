"""Engine processes: the real core and loop over real pages, without a model; and the faults that befall them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Protocol

from paged_executor import PagedExecutor, PagedStepResult, check_accounts

from fault_simulation.network import Network, Router
from fault_simulation.world import Event, Inbox, KilledError, Process, Thread, World, sleep
from quire.engine_core.crash_journal import CrashJournal
from quire.engine_core.engine import EngineCore
from quire.engine_core.loop import EngineLoop
from quire.engine_core.request import Request
from quire.engine_core.transport.access import OWNER
from quire.engine_core.transport.clients import ClientId, ServerCounters
from quire.engine_core.transport.sessions import ClientSessions, IsOpen, Reject
from quire.frontend.client.launcher import Beat
from quire.frontend.errors import EngineDeadError, EngineStartError
from quire.protocol.engine_shape import EngineShape
from quire.protocol.messages import PROTOCOL_VERSION, EngineCoreOutputs, EngineGoodbye, EngineMessage, Ready

ADDRESS = "ipc:///simulated"
HEARTBEAT_SECONDS = 1.0
POISON = 3
"""First token of a prompt on which the engine dies."""

BROKEN = 5
"""First token of a prompt with which each step fails."""

_BEAT_SECONDS = 1.0
_RETRY_SECONDS = 0.05
_CHECK_EVERY = 4  # steps
_LONGEST_STEP = 0.3  # seconds


class Misfortune(Protocol):
    """What is in store for engines."""

    def load_seconds(self) -> float:
        """Return how long the next model takes to load."""

    def fails_to_start(self) -> bool:
        """Return True if the next engine does."""

    def step_seconds(self) -> float:
        """Return how long the next step takes."""

    def excuse(self, requests: list[Request]) -> None:
        """Note that a step with these requests fails."""

    def is_responsible_for(self, error: Exception) -> bool:
        """Return True for an error that it has raised in a step."""

    def before_step(self, engine: SimulatedEngine) -> None:
        """Let something happen to a step: an error, a hang, the end."""


class Server:
    """The thread of the engine's socket: what `EngineServer` does on a real one."""

    def __init__(self, process: Process, network: Network, inbox: Inbox, ready: Ready, max_waiting_values: int) -> None:
        self.last_step = process.world.now
        self.failure: BaseException | None = None
        self.counters = ServerCounters()
        self._process = process
        self._network = network
        self._inbox = inbox
        self._ready = ready
        self._max_waiting_values = max_waiting_values
        self._outgoing: deque[tuple[ClientId, EngineMessage]] = deque()
        self._ended: dict[tuple[ClientId, str], None] = {}
        self._is_awake = False
        self._timer = float("inf")

    def start(self, reject: Reject, is_open: IsOpen) -> None:
        self.router = Router(self._network, self._process, ADDRESS)
        self.router.on_readable = self._wake
        self._sessions = ClientSessions(
            self._ready,
            self._inbox.put,
            transmit=self.router.transmit,
            reject=reject,
            is_open=is_open,
            receive_kv=lambda _client_id, _message: None,
            step_age=lambda now: max(0.0, now - self.last_step),
            counters=self.counters,
            silent_heartbeats=10,
            max_clients=1000,
            max_waiting_values=self._max_waiting_values,
        )

    def send(self, client_id: ClientId, message: EngineMessage) -> None:
        self._process.burn()
        if isinstance(message, EngineCoreOutputs):
            self._check_ends(client_id, message)
        self._outgoing.append((client_id, message))
        self._wake()

    def stop(self) -> None:
        """Say goodbye, and let all that was sent arrive."""
        self._send_outgoing()
        self._sessions.say_goodbye(EngineGoodbye("the engine was stopped"))
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


class SimulatedExecutor(PagedExecutor):
    """Steps that take virtual time, and in which things happen."""

    def __init__(self, engine: SimulatedEngine, limits: EngineShape) -> None:
        super().__init__(limits)
        self._engine = engine

    def step(
        self, slots: list[int], starts: list[int], counts: list[int], num_drafts: list[int] | None = None
    ) -> PagedStepResult:
        engine = self._engine
        if len(self.steps) % _CHECK_EVERY == 0:
            engine.check_accounts()
        engine.requests_in_step = list({self.request_of(slot): None for slot in slots})
        seconds = engine.misfortune.step_seconds()
        share = engine.world.random.random()
        sleep(share * seconds)
        engine.misfortune.before_step(engine)
        try:
            result = super().step(slots, starts, counts, num_drafts)
        except AssertionError as error:
            engine.world.fail_by(error)
            raise
        sleep((1 - share) * seconds)
        engine.requests_in_step = []
        return result

    def _breaks(self, request: Request) -> bool:
        if request.prompt_token_ids[0] != BROKEN:
            return False
        self._engine.misfortune.excuse(self._engine.requests_in_step)
        return True  # PagedExecutor raises then

    def request_of(self, slot: int) -> Request:
        """Return the running request of a slot."""
        return next(request for request in self.requests() if slot in request.slots)


class SimulatedEngine:
    """One run of an engine in a process of its own: what `EngineProcess` is to the supervisor."""

    def __init__(
        self,
        world: World,
        network: Network,
        limits: EngineShape,
        misfortune: Misfortune,
        *,
        pid: int,
        eos_token_ids: list[int],
        stands_by: bool,
        max_waiting_values: int,
        crash_journal_fd: int,
        on_ready: Callable[[SimulatedEngine], None],
    ) -> None:
        self.world = world
        self.misfortune = misfortune
        self.limits = limits
        self.pid = pid
        self.process = Process(world, f"engine {pid}")
        self.ended = Event(world)
        self.num_beats = 0
        self.last_beat: Beat | None = None
        self.core: EngineCore | None = None
        self.requests_in_step: list[Request] = []
        self._on_ready = on_ready
        self._network = network
        self._eos_token_ids = eos_token_ids
        self._max_waiting_values = max_waiting_values
        self._crash_journal_fd = crash_journal_fd
        self._status = -9
        self._may_begin = Event(world)
        self._is_ready = False
        self._settled = Event(world)  # ready or ended
        self._loop: EngineLoop | None = None
        if not stands_by:
            self._may_begin.set()
        self.process.on_death.append(self._note_death)
        Thread(self.process, "main", self._main).start()

    # What the supervisor uses

    @property
    def status(self) -> int | None:
        return self._status if self.ended.is_set() else None

    def begin(self) -> None:
        self._may_begin.set()

    def wait_ready(self, timeout: float) -> str:
        if not self._settled.wait(timeout):
            raise EngineStartError(f"the engine was not ready within {timeout:g} s")
        if not self._is_ready:
            raise EngineStartError("the engine did not start: there is no memory")
        return ADDRESS

    def exit_report(self) -> EngineDeadError:
        return EngineDeadError(f"the engine exited with status {self._status}", f"it was process {self.pid}")

    def stop(self, seconds: float) -> None:
        self.process.resume()
        if self.process.is_alive and self._loop is not None:
            self._loop.drain()
            self.ended.wait(seconds)
        self.process.kill("stopped")
        self.ended.wait()

    def interrupt(self) -> None:
        if self._loop is not None:
            self._loop.stop()

    def abort(self) -> None:
        self.process.resume()
        sleep(0.1)
        self.process.kill("aborted")
        self.ended.wait()

    # What runs in it

    def check(self) -> None:
        """Check that each page is somewhere; after each event."""
        if self.core is not None:
            sequences = self.core.sequences
            total = sequences.free_pages + sequences.cached_pages + sequences.held_pages
            if total != self.limits.num_pages:
                self.world.fail(f"{total} of {self.limits.num_pages} pages are accounted for")

    def check_accounts(self) -> None:
        """Check the accounts of each request and page; now and then, when the step is decided."""
        assert self.core is not None
        try:
            check_accounts(self.core, self.limits)
        except AssertionError as error:
            self.world.fail_by(error)

    @property
    def is_idle(self) -> bool:
        """True if it has nothing to do, or is dead."""
        return self.core is None or not self.core.has_requests

    def check_idle(self) -> None:
        """Check that nothing is held for nobody."""
        if self.core is not None:
            if not self.is_idle:
                self.world.fail("the engine has requests that no client has")
            elif held := self.core.sequences.held_pages:
                self.world.fail(f"{held} pages are held without a request")

    def _expect_no_requests(self, client_id: ClientId, server: Server, patience: int) -> None:
        """Check that the requests of a client that is gone end, after so many looks at an engine that steps."""
        if self.core is None or client_id not in self.core._requests.clients:
            return
        is_stepping = self.world.now - server.last_step < _LONGEST_STEP
        if is_stepping and patience == 0:
            self.world.fail("the requests of a client that is gone go on")
        else:
            again = partial(self._expect_no_requests, client_id, server, patience - is_stepping)
            self.process.after(0.6, again)

    def exit(self, status: int) -> None:
        """End the process, from a thread of its own."""
        self._status = status
        self.process.kill(f"exit status {status}")
        raise KilledError

    def _note_death(self) -> None:
        self.core = None
        self._settled.set()
        self.ended.set()

    def _main(self) -> None:
        self._may_begin.wait()
        sleep(self.misfortune.load_seconds())
        if self.misfortune.fails_to_start():
            self.exit(1)
        process, limits = self.process, self.limits
        inbox = Inbox()
        ready = Ready(
            PROTOCOL_VERSION, "model", "Simulated", limits.max_model_len, limits.vocab_size, limits.num_pages,
            limits.block_size, limits.max_num_seqs, self.pid, HEARTBEAT_SECONDS, self._eos_token_ids,
            limits.hidden_size, limits,
        )  # fmt: skip
        server = Server(process, self._network, inbox, ready, self._max_waiting_values)
        executor = SimulatedExecutor(self, limits)
        journal = CrashJournal(self._crash_journal_fd)
        core = EngineCore(executor, limits, server.send, clock=process.monotonic, is_supervised=True, journal=journal)
        executor.requests = lambda: core.scheduler.running
        self._loop = EngineLoop(core, server, inbox, drain_seconds=5.0, is_supervised=True, clock=process.monotonic)
        server.start(core.reject_early, core.is_open)
        server.router.on_gone = lambda client_id: self._expect_no_requests(client_id, server, 2)
        self.core, self._is_ready = core, True
        self._on_ready(self)
        self.world.log(f"{process.name} is ready")
        process.soon(self._settled.set)
        Thread(process, "heart", lambda: self._beat(server)).start()
        try:
            self._loop.run()
        except Exception as error:  # noqa: BLE001 - it ends the engine, as in `process.py`
            if not self.misfortune.is_responsible_for(error):
                self.world.fail_by(error)
            self.exit(1)
        server.stop()
        self.exit(0)

    def _beat(self, server: Server) -> None:
        while True:
            assert self.core is not None
            self.last_beat = Beat(max(0.0, self.world.now - server.last_step), self.core.last_stats)
            self.num_beats += 1
            sleep(_BEAT_SECONDS)
