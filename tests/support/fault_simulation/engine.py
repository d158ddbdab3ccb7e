"""Engine processes: the real core and loop over real pages, without a model; and the faults that befall them."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from paged_executor import PagedExecutor, PagedStepResult, check_accounts

from fault_simulation.disk import ProcessDisk
from fault_simulation.network import Network
from fault_simulation.server import ADDRESS, Server
from fault_simulation.storage import ProcessMemory, Storage, first_checksum, start_disk_tier
from fault_simulation.world import Event, Inbox, KilledError, Process, Thread, World, sleep
from quire.engine_core.crash_journal import CrashJournal
from quire.engine_core.engine import EngineCore, EngineParts
from quire.engine_core.features import make_features
from quire.engine_core.host import EngineHost
from quire.engine_core.kv_tiers.file_tier import FileTier
from quire.engine_core.loop import EngineLoop
from quire.engine_core.request import Request
from quire.engine_core.supervisor_link import Answer
from quire.engine_core.transport.clients import ClientId
from quire.engine_core.transport.sessions import EngineCallbacks
from quire.engine_core.utilities import DEFERRED
from quire.frontend.client.launcher import Beat, Loaded, ReloadCall
from quire.frontend.errors import EngineDeadError, EngineStartError
from quire.kernels.step import StepInput
from quire.protocol.engine_shape import EngineShape
from quire.protocol.messages import (
    PROTOCOL_VERSION,
    Ping,
    Ready,
    UtilityCall,
    UtilityResult,
)
from quire.protocol.supervision import GAVE_WAY

HEARTBEAT_SECONDS = 1.0
POISON = 3
"""First token of a prompt on which the engine dies."""

BROKEN = 5
"""First token of a prompt with which each step fails."""

_BEAT_SECONDS = 1.0
_BEGIN_SECONDS = 5.0
_CHECK_EVERY = 4  # steps
_LONGEST_STEP = 0.3  # seconds


class Misfortune(Protocol):
    """Faults that are planned for engines."""

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


class SimulatedExecutor(PagedExecutor):
    """Steps that take virtual time, and in which things happen."""

    def __init__(self, engine: SimulatedEngine, limits: EngineShape, memory: ProcessMemory, model: str) -> None:
        super().__init__(limits, memory.pages.sequences, memory.positions)
        self._engine = engine
        self._kv = memory
        self._model = model

    def submit(self, step: StepInput) -> PagedStepResult:
        engine = self._engine
        if len(self.steps) % _CHECK_EVERY == 0:
            engine.check_accounts()
        engine.requests_in_step = list({self.request_of(slot): None for slot in step.slots})
        seconds = engine.misfortune.step_seconds()
        share = engine.world.random.random()
        sleep(share * seconds)
        engine.misfortune.before_step(engine)
        try:
            result = super().submit(step)
        except AssertionError as error:
            engine.world.fail_by(error)
            raise
        self._kv.seal()
        sleep((1 - share) * seconds)
        engine.requests_in_step = []
        return result

    def first_checksum(self, request: Request) -> int:
        self._engine.process.burn()  # between the rows of a step
        return first_checksum(self._model, request.cache_salt)

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
        storage: Storage,
        *,
        kept_memory: int,
        pid: int,
        eos_token_ids: list[int],
        standby: str | None,
        max_waiting_bytes: int,
        crash_journal_fd: int,
        on_ready: Callable[[SimulatedEngine], None],
        on_reload: Callable[[ReloadCall], None],
    ) -> None:
        """`kept_memory`: the descriptor of the KV memory that the supervisor keeps."""
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
        self.kept_memory = os.dup(kept_memory)
        self._storage = storage
        self._disk = None if storage.disk is None else ProcessDisk(self.process, storage.disk)
        self._memory: ProcessMemory | None = None
        self._tier: FileTier | None = None
        self._on_ready = on_ready
        self._network = network
        self._eos_token_ids = eos_token_ids
        self._max_waiting_bytes = max_waiting_bytes
        self._crash_journal_fd = crash_journal_fd
        self._status = -9
        self.num_blamed = 0
        self._may_begin = Event(world)
        self._has_begun = Event(world)  # or ended
        self._is_ready = False
        self._has_started = Event(world)  # or ended
        self._loop: EngineLoop | None = None
        self._server: Server | None = None
        self._standby = standby
        self._on_reload = on_reload
        self._loaded = Event(world)  # or ended
        self._is_loaded = False
        self._reloads: list[tuple[ClientId, int]] = []  # clients and their calls
        self._reload_answer: Answer | None = None
        if standby is None:
            self._may_begin.set()
        self.process.on_death.append(self._note_death)
        Thread(self.process, "main", self._main).start()

    # What the supervisor uses

    @property
    def status(self) -> int | None:
        return self._status if self.ended.is_set() else None

    def begin(self) -> bool:
        self._may_begin.set()
        return self._has_begun.wait(_BEGIN_SECONDS) and not self.ended.is_set()

    def wait_ready(self, timeout: float) -> str:
        if not self._has_started.wait(timeout):
            raise EngineStartError(f"the engine was not ready within {timeout:g} s")
        if not self._is_ready:
            raise EngineStartError("the engine did not start: there is no memory")
        return ADDRESS

    def wait_loaded(self, timeout: float) -> Loaded:
        self._loaded.wait(timeout)
        if not self._is_loaded:
            raise EngineStartError("the engine did not load its model")
        return Loaded({}, self.limits.vocab_size, self._eos_token_ids)

    def tell(self, word: str, **fields: Any) -> None:
        self.process.soon(partial(self._take_order, word, Answer(**fields)))

    def exit_report(self, name: str = "the engine") -> EngineDeadError:
        return EngineDeadError(f"{name} exited with status {self._status}", f"it was process {self.pid}")

    def stop(self, seconds: float) -> None:
        if self.process.is_alive and self._loop is not None:
            self.process.resume()
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
        if self.core is not None and self.process.is_alive:
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
        self._storage.check()

    @property
    def is_idle(self) -> bool:
        """True if it has nothing to do, or is dead."""
        return self.core is None or not (self.core.has_requests or self.core.scheduler.fetches.is_open)

    def check_idle(self) -> None:
        """Check that nothing is held for nobody."""
        if self.core is not None:
            if not self.is_idle:
                self.world.fail("the engine has requests that no client has, or fetches for none")
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

    def crash(self, why: str) -> None:
        """End the process by SIGSEGV, of what it does itself; from a thread of its own."""
        self._status = -signal.SIGSEGV
        self.process.kill(why)
        raise KilledError

    def orphan(self) -> None:
        """Learn from the kernel that the process that has started it is dead."""
        if self._is_ready:
            self.process.resume()
            self.process.soon(partial(self.process.kill, "its supervisor is dead"))
        else:
            self.process.kill("its supervisor is dead")

    def exit(self, status: int) -> None:
        """End the process, from a thread of its own."""
        self._status = status
        self.process.kill(f"exit status {status}")
        raise KilledError

    def close(self) -> None:
        """Give back what it has open on this host, when the run is over."""
        if self._memory is not None:
            self._storage.count_memory(self._memory)
            self._memory.close()
        if self._tier is not None:
            self._storage.count_disk(self._tier.stats())
        if self._disk is not None:
            self._disk.close_all()
        if self.kept_memory >= 0:
            os.close(self.kept_memory)
            self.kept_memory = -1

    def _reload(self, client_id: ClientId, call: UtilityCall) -> object:
        assert call.reload is not None
        self._reloads.append((client_id, call.call_id))
        self._on_reload(ReloadCall(len(self._reloads) - 1, call.reload.settings, call.reload.drain_timeout))
        return DEFERRED

    def _take_order(self, word: str, answer: Answer) -> None:
        if word == "GIVE_WAY":
            assert self._loop is not None
            self._reload_answer = answer
            self._loop.give_way(answer.drain_timeout)
        else:
            self._answer_reload(answer)

    def _answer_reload(self, answer: Answer) -> None:
        assert self._server is not None
        client_id, call_id = self._reloads[answer.number]
        result = {"engine_pid": answer.engine_pid}
        self._server.send(client_id, UtilityResult(call_id, None if answer.error else result, answer.error))

    def _note_death(self) -> None:
        self.core = None
        self._has_begun.set()
        self._loaded.set()
        self._has_started.set()
        self.ended.set()

    def _wait_to_begin(self) -> None:
        self._may_begin.wait()
        self._has_begun.set()

    def _main(self) -> None:
        if self._standby == "program":
            self._wait_to_begin()
        sleep(self.misfortune.load_seconds())
        if self.misfortune.fails_to_start():
            self.exit(1)
        self._is_loaded = True
        self._loaded.set()
        self._wait_to_begin()
        process, limits = self.process, self.limits
        inbox = Inbox()
        ready = Ready(
            PROTOCOL_VERSION, "model", "Simulated", limits.max_model_len, limits.vocab_size, limits.num_pages,
            limits.block_size, limits.max_num_seqs, self.pid, HEARTBEAT_SECONDS, self._eos_token_ids,
            limits.hidden_size, limits,
        )  # fmt: skip
        self._server = server = Server(process, self._network, inbox, ready, self._max_waiting_bytes)
        memory, model = ProcessMemory(process, self._storage, self.kept_memory), self._storage.model
        self._memory = memory
        executor = SimulatedExecutor(self, limits, memory, model)
        self._tier = tier = start_disk_tier(process, self._storage, memory, self._disk)
        journal = CrashJournal(self._crash_journal_fd)
        self.num_blamed = journal.num_explained_deaths
        core = EngineCore(
            executor,
            limits,
            server.send,
            EngineParts(
                make_features(executor.sequences, limits, server.send, process.monotonic, journal=journal),
                tiers=[] if tier is None else [tier],
            ),
            EngineHost(lambda: inbox.put((b"", Ping())), self._reload, is_supervised=True),
            clock=process.monotonic,
        )
        executor.requests = lambda: core.scheduler.running
        self._loop = EngineLoop(core, server, inbox, drain_seconds=5.0, is_supervised=True, clock=process.monotonic)
        server.start(EngineCallbacks(core.reject_early, core.is_open, report_sent=core.report_sent))
        server.router.on_gone = lambda client_id: self._expect_no_requests(client_id, server, 2)
        self.core, self._is_ready = core, True
        self._on_ready(self)
        self.world.log(f"{process.name} is ready")
        process.soon(self._has_started.set)
        Thread(process, "heart", lambda: self._beat(server)).start()
        try:
            ends = self._loop.run()
        except Exception as error:  # noqa: BLE001 - it ends the engine, as in `process.py`
            if not self.misfortune.is_responsible_for(error):
                self.world.fail_by(error)
            self.exit(1)
        if not ends:
            assert self._reload_answer is not None
            self._answer_reload(self._reload_answer)
            server.stop(gives_way=True)
            self.exit(GAVE_WAY)
        server.stop()
        core.stop()
        self.exit(0)

    def _beat(self, server: Server) -> None:
        while True:
            assert self.core is not None
            self.last_beat = Beat(max(0.0, self.world.now - server.last_step), self.core.last_stats)
            self.num_beats += 1
            sleep(_BEAT_SECONDS)
