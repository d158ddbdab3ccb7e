"""A run of a seed: the system is built, used, disturbed, and judged."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast
from unittest.mock import patch

import small_tokenizers

from fault_simulation.clients import SimulatedClient, Wish
from fault_simulation.disk import Disk
from fault_simulation.engine import BROKEN, POISON, SimulatedEngine
from fault_simulation.faults import Faults
from fault_simulation.judge import Judge
from fault_simulation.network import Network
from fault_simulation.operator import Operator
from fault_simulation.server import ADDRESS
from fault_simulation.storage import Storage, disk_bytes
from fault_simulation.world import Process, Thread, World
from quire.engine_core.kv_tiers import file_tier
from quire.engine_core.request import Request
from quire.frontend.client import engine_client, standby, supervisor
from quire.frontend.client.launcher import ReloadCall
from quire.frontend.client.supervisor import ProcessTimeouts, Supervisor
from quire.frontend.errors import EngineDeadError
from quire.frontend.text.tokenizer import Tokenizer
from quire.protocol.engine_options import SupervisionOptions
from quire.protocol.engine_shape import EngineShape

_PATIENCE = 600.0  # virtual seconds in which everything must have ended
_VOCAB_SIZE = 300
_MANY_BYTES = 512 << 20
_FEW_BYTES = 21_600  # that may wait for slow clients
_FOLLOWING = 0.4  # of the prompts begin with a whole one from before
_MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None  # folders in memory
_DISK_POLL_SECONDS = 1.0  # instead of a shorter time, which would be most of the events of a disk
_GIVEN_UP = EngineDeadError("the engine is not started again")
_LONGEST_UNGUARDED = 90.0  # seconds without a process that stands by
_OPERATED = 0.3  # of the runs
_EOS_TOKEN_IDS = [210, 220, 230, 240, 250, 260]


@dataclass
class Outcome:
    """Result of a simulation. `problems` is empty if it found none."""

    seed: int
    problems: list[str]
    trace: list[str]
    injected: Counter[str]
    ends: Counter[str] = field(default_factory=Counter)
    num_pages: Counter[str] = field(default_factory=Counter)  # KV pages by outcome
    num_events: int = 0
    seconds: float = 0.0  # virtual time at the end


def run(seed: int, *, is_traced: bool = False) -> Outcome:
    """Run a seed, within `silence`."""
    gc.collect()  # what the seed before has left
    system = System(seed, is_traced=is_traced)
    try:
        system.live()
    finally:
        system.end()
    world, num_pages = system.world, system.storage.num_pages
    return Outcome(
        seed, world.problems, world.trace or [], system.faults.injected, system.ends, num_pages, world.num_events,
        world.now,
    )  # fmt: skip


class System:
    """Everything: a client with its supervisor and engine, other clients, a network, and faults."""

    def __init__(self, seed: int, *, is_traced: bool) -> None:
        self.world = world = World(seed, is_traced=is_traced)
        choose = world.random
        self.chance = random.Random(f"more of {seed}")  # for what was added later: what the seed draws stays
        self.ends: Counter[str] = Counter()
        self.engine: SimulatedEngine | None = None  # the last one that has begun
        self.engines: list[SimulatedEngine] = []
        self.num_deaths = 0
        self.limits = EngineShape(
            vocab_size=_VOCAB_SIZE,
            max_model_len=64,
            max_num_seqs=choose.choice((3, 4, 8)),
            max_num_batched_tokens=choose.choice((8, 12, 40)),
            block_size=4,
            num_pages=choose.choice((18, 24, 30, 60)),
            enable_prefix_caching=choose.random() < 0.9,
            scheduling_policy=choose.choice(("fcfs", "fcfs", "priority", "lpm", "sjf")),
            hidden_size=4,
        )
        self.network = Network(world, delay=choose.choice((0.001, 0.02, 0.2)), capacity=choose.choice((2, 8, 1000)))
        self.max_waiting_bytes = choose.choice((_MANY_BYTES, _MANY_BYTES, _FEW_BYTES))
        self.held: list[int] = []  # descriptors of others
        self._folder: TemporaryDirectory[str] | None = None
        self.storage = self._make_storage()
        self.operator: Operator | None = None
        is_operated = self.chance.random() < _OPERATED
        self.faults = Faults(self, world, has_operator=is_operated)
        if is_operated:
            self.operator = Operator(world, self._supervise, is_patient=not self.dies_often)
        tokenizer = _tokenizer()
        self._judge = Judge(self, _EOS_TOKEN_IDS)
        self.clients: list[SimulatedClient] = []
        self._num_wishes = 0
        self._prompts: list[list[int]] = []  # that harm nobody
        for index in range(choose.choice((1, 1, 2, 3))):
            wishes = [self._wish(tokenizer) for _ in range(choose.randint(1, 7))]
            self.clients.append(
                SimulatedClient(
                    world,
                    self.network,
                    wishes,
                    f"client {index}",
                    eos_token_ids=_EOS_TOKEN_IDS,
                    reconnect_timeout=300.0 if index or is_operated else float("inf"),
                    start_supervisor=None if index or is_operated else self._supervise,
                    on_end=self._judge.judge,
                )
            )
        owner, operator = self.clients[0], self.operator
        if operator is not None:
            owner.engine_failure = lambda: _GIVEN_UP if operator.has_given_up else None
        for client in self.clients[1:]:
            client.engine_failure = lambda: owner.start_error or owner.engine_failure()
        world.check = self._check

    @property
    def supervisor(self) -> Supervisor | None:
        """The supervisor of the engine, if there is one now."""
        return self.clients[0].supervisor if self.operator is None else self.operator.supervisor

    @property
    def dies_often(self) -> bool:
        """True if the engine will die whenever it is started."""
        return "engine dies again and again" in self.faults.names

    def live(self) -> None:
        """Let everybody do what they want, until all have what they get."""
        world = self.world
        world.run(lambda: self.faults.are_over or self._are_content(), float("inf"))
        if not world.run(self._are_content, world.now + _PATIENCE):
            waiting = [wish.number for client in self.clients for wish in client.wishes if wish.ended is None]
            if not world.problems:
                world.fail(f"requests {waiting} wait without end")
            return
        self._wait_until_idle()
        was_slow = self.max_waiting_bytes == _FEW_BYTES  # and may have been dropped for it
        if not (self.faults.injected or was_slow) and any(client.num_losses for client in self.clients):
            world.fail("a connection was lost without a reason")
        for client in self.clients:
            if client.process.is_alive:
                client.process.resume()
                client.close()
        if not world.run(
            lambda: all(each.is_done or not each.process.is_alive for each in self.clients), world.now + _PATIENCE
        ):
            world.fail("not everybody could leave")
        if self.operator is not None:
            operator = self.operator
            operator.close()
            if not world.run(lambda: operator.is_done, world.now + _PATIENCE):
                world.fail("the supervisor does not end")

    def end(self) -> None:
        """Unwind all that is left."""
        owners = [] if self.operator is None else [self.operator.process]
        users = [client.process for client in self.clients]
        for process in [*(engine.process for engine in self.engines), *users, *owners]:
            process.is_alive = False
            process.unwind()
        for engine in self.engines:
            engine.close()
        for descriptor in self.held:
            os.close(descriptor)
        if self._folder is not None:
            self._folder.cleanup()

    def poison_in(self, requests: Sequence[Request]) -> str | None:
        """Return a request among these that kills the engine."""
        return next((each.request_id for each in requests if each.prompt_token_ids[0] == POISON), None)

    def _make_storage(self) -> Storage:
        choose, disk = self.world.random, None
        num_slots = choose.choice((4, 12, 40, 100, 100))
        if choose.random() < 0.5:
            self._folder = TemporaryDirectory(dir=_MEMORY)
            disk = Disk(self.world, Path(self._folder.name) / "kv", choose.choice((1e-4, 1e-3, 1e-2, 0.1)))
        return Storage(
            self.world,
            self.limits,
            disk,
            disk_bytes(num_slots),
            keeps_memory=choose.random() < (0.8 if disk is None else 0.3),
        )

    def _are_content(self) -> bool:
        return all(client.is_content for client in self.clients)

    def _wish(self, tokenizer: Tokenizer) -> Wish:
        choose = self.world.random
        self._num_wishes += 1
        hazard = choose.random()
        wish = Wish(
            self._num_wishes, choose, tokenizer, hazard=POISON if hazard < 0.02 else BROKEN if hazard < 0.04 else None,
            has_priorities=self.limits.scheduling_policy == "priority",
        )  # fmt: skip
        if hazard >= 0.04:
            if self._prompts and choose.random() < _FOLLOWING:
                wish.prompt = choose.choice(self._prompts) + choose.choice(([], [61, 62, 63]))
            else:
                self._prompts.append(wish.prompt)
        return wish

    def _supervise(self, process: Process) -> Supervisor:
        options = SupervisionOptions(max_restarts=3 if self.dies_often else 100, step_timeout=5.0)
        owned = Supervisor(
            ADDRESS, {"model": "model"}, options, timeouts=ProcessTimeouts(60.0, 5.0), host=process.host,
            process=cast("Any", partial(self._new_engine, process)),
        )  # fmt: skip
        process.on_death.append(owned._release)
        return owned

    def _new_engine(
        self,
        owner: Process,
        _flags: list[str],
        *,
        kept_fds: list[int],
        standby: str | None,
        on_reload: Callable[[ReloadCall], None],
    ) -> SimulatedEngine:
        def pass_on(call: ReloadCall) -> None:
            self.faults.count("engine reloaded")
            Thread(owner, "watch", partial(on_reload, call)).start()

        engine = SimulatedEngine(
            self.world, self.network, self.limits, self.faults, self.storage, kept_memory=kept_fds[0],
            pid=len(self.engines) + 1, eos_token_ids=_EOS_TOKEN_IDS, standby=standby,
            crash_journal_fd=kept_fds[1], max_waiting_bytes=self.max_waiting_bytes, on_ready=self._note_ready,
            on_reload=pass_on,
        )  # fmt: skip
        engine.process.on_death.append(self._note_death)
        owner.on_death.append(engine.orphan)
        self.engines.append(engine)
        return engine

    def _note_ready(self, engine: SimulatedEngine) -> None:
        self.engine = engine

    def _note_death(self) -> None:
        self.num_deaths += 1
        self.storage.check()

    def _check(self) -> None:
        if self.engine is not None:
            self.engine.check()

    def _wait_until_idle(self) -> None:
        """Wait until the engine knows that nobody wants anything; then nothing may be held, and a process stands by."""
        self.world.run(lambda: self.engine is None or self.engine.is_idle, self.world.now + 45.0)
        if self.engine is not None:
            self.engine.check_idle()
        if self.faults.injected["standby killed"] and not self.world.run(
            self._is_standby_replaced, self.world.now + _LONGEST_UNGUARDED
        ):
            self.world.fail("no other process stands by")

    def _is_standby_replaced(self) -> bool:
        if (supervisor := self.supervisor) is None or supervisor.failure is not None:
            return True
        standby = supervisor._standby.process
        return standby is not None and not standby.ended.is_set()


@cache
def _tokenizer() -> Tokenizer:
    with TemporaryDirectory() as folder:
        return Tokenizer(str(small_tokenizers.write(Path(folder), "byte_level")))


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Log nothing; let no collection of garbage look at more than a run has left, and clients connect less often while
    there is no engine, which take most of the time otherwise.
    """
    logging.disable()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        with (
            patch.object(engine_client, "_RETRY_SECONDS", 0.25),
            patch.object(file_tier, "_POLL_SECONDS", _DISK_POLL_SECONDS),
            patch.object(supervisor, "show"),
            patch.object(standby, "show"),
        ):
            yield
    finally:
        gc.enable()
        gc.unfreeze()
        logging.disable(logging.NOTSET)
