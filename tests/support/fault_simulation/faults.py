"""The faults that a seed has in store: when they happen, to whom, and how often each kind was injected."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fault_simulation.storage_faults import Kinds, StorageFaults
from fault_simulation.world import KilledError, World, sleep

if TYPE_CHECKING:
    from fault_simulation.clients import SimulatedClient
    from fault_simulation.engine import SimulatedEngine
    from fault_simulation.simulation import System
    from fault_simulation.world import Process
    from quire.engine_core.request import Request

_FIRST, _LAST = 0.3, 8.0  # seconds between which faults begin
_STANDBY_KILLED = 0.3  # of the runs, if it has begun to stand by
_FOREVER = 1e9
_BRIEF = {
    "engine killed",
    "engine killed between two lines",
    "engine killed in a step",
    "error in a step",
    "memory refused in a step",
    "client killed",
    "connection cut",
}
_STALLING = {"engine stopped", "host suspended", "engine hangs in a step"}  # so that a read takes too long


class StepFailedError(Exception):
    """An error of the executor."""


class Faults:
    """All that goes wrong in a run: the `Misfortune` of its engines, and faults at given times."""

    def __init__(self, system: System, world: World, *, has_operator: bool) -> None:
        self.injected: Counter[str] = Counter()
        self.culprits: set[tuple[int, ...]] = set()  # prompts of requests that a failed step may end
        self.are_over = False
        self._system = system
        self._world = world
        self._random = world.random
        self._step_seconds = self._random.choice((0.005, 0.02, 0.06, 0.15))
        self._load_seconds = self._random.choice((0.2, 1.0, 3.0))
        self._num_failing_starts = 0
        self._num_failing_steps = 0
        self._step_error: type[Exception] = StepFailedError
        self._in_step: Callable[[SimulatedEngine], None] | None = None  # what happens to the next one
        kinds: Kinds = {
            "engine killed": (5, self._kill),
            "engine killed between two lines": (5, self._kill_at_a_line),
            "engine killed in a step": (4, self._kill_in_step),
            "error in a step": (4, self._fail_steps),
            "memory refused in a step": (2, self._refuse_memory),
            "engine hangs in a step": (2, self._hang),
            "engine stopped": (3, self._stop_engine),
            "start fails": (3, self._fail_starts),
            "engine dies again and again": (1, self._begin_crash_loop),
            "client killed": (3, self._kill_client),
            "client stopped": (3, self._stop_client),
            "connection cut": (4, self._cut),
            "network stalls": (4, self._stall),
            "host suspended": (2, self._suspend),
        }
        self._storage = StorageFaults(system, self.injected)
        of_storage = self._storage.kinds
        names = self._choose(kinds, (0, 1, 1, 2, 2, 3, 4, 6)) + self._choose(of_storage, (0, 0, 1, 1, 2, 4))
        self.are_brief = set(names) <= _BRIEF | of_storage.keys()  # none keeps anybody from answering for long
        more: dict[str, tuple[float, Callable[[], bool]]] = {"standby stopped": (0.15, self._stop_standby)}
        if has_operator:
            more["supervisor killed"] = (0.6, self._kill_supervisor)
        added = [name for name, (share, _) in more.items() if system.chance.random() < share]
        for name in added:
            self._plan(name, system.chance.uniform(_FIRST, _LAST), more[name][1])
        if system.chance.random() < _STANDBY_KILLED:  # which keeps nobody from answering
            self._plan("standby killed", system.chance.uniform(_FIRST, _LAST), self._kill_standby)
        self.are_brief = self.are_brief and not added
        self.names = names
        system.storage.is_harmed = not of_storage.keys().isdisjoint(names) or not _STALLING.isdisjoint(names)
        kinds |= of_storage
        for name in names:
            self._plan(name, self._random.uniform(_FIRST, _LAST), kinds[name][1])
        world.at(_LAST + 12.0, self._end)

    @property
    def dooms(self) -> bool:
        """True if the engine dies whenever it is started."""
        return self.injected["engine dies again and again"] > 0

    def load_seconds(self) -> float:
        return self._load_seconds * (0.5 + self._random.random())

    def fails_to_start(self) -> bool:
        if self.dooms:
            return True
        if self._num_failing_starts == 0:
            return False
        self._num_failing_starts -= 1
        self.count("start fails")
        return True

    def step_seconds(self) -> float:
        return self._step_seconds * (0.5 + self._random.random())

    def before_step(self, engine: SimulatedEngine) -> None:
        requests = engine.requests_in_step
        if poison := self._system.poison_in(requests):
            self.count("poisoned request kills the engine")
            engine.crash(f"poisoned by {poison}")
        if self._num_failing_steps > 0:
            self._num_failing_steps -= 1
            if self._step_error is StepFailedError:
                self.count("error in a step")
            self.excuse(requests)
            self._world.log(f"{engine.process.name}: a step with {len(requests)} requests fails")
            raise self._step_error("out of luck")
        if self._in_step is not None:
            happen, self._in_step = self._in_step, None
            happen(engine)

    def excuse(self, requests: list[Request]) -> None:
        if len(requests) == 1:
            self.culprits.add(tuple(requests[0].prompt_token_ids))

    def is_responsible_for(self, error: Exception) -> bool:
        self.count("step ends its engine")
        return isinstance(error, StepFailedError | MemoryError) or str(error) == "poisoned"

    def count(self, name: str) -> None:
        """Count a fault that has happened."""
        self.injected[name] += 1

    def _choose(self, kinds: Kinds, counts: tuple[int, ...]) -> list[str]:
        weights = [weight for weight, _ in kinds.values()]
        return self._random.choices(list(kinds), weights, k=self._random.choice(counts))

    def _plan(self, name: str, when: float, fault: Callable[[], bool]) -> None:
        self._world.at(when, lambda: self._inject(name, fault))

    def _inject(self, name: str, fault: Callable[[], bool]) -> None:
        if fault():
            self.count(name)
            self._world.log(f"fault: {name}")

    def _end(self) -> None:
        self.are_over = True
        self._storage.end()
        self._in_step = None
        self._num_failing_steps = 0

    def _kill(self) -> bool:
        engine = self._system.engine
        if engine is None or not engine.process.is_alive:
            return False
        engine.process.kill("by a fault")
        return True

    def _kill_at_a_line(self) -> bool:
        engine = self._system.engine
        if engine is None or not engine.process.is_alive:
            return False
        engine.process.fuse = self._random.randint(1, 600)
        return True

    def _kill_in_step(self) -> bool:
        def happen(engine: SimulatedEngine) -> None:
            engine.process.kill("in a step")
            raise KilledError

        self._in_step = happen
        return True

    def _hang(self) -> bool:
        def happen(engine: SimulatedEngine) -> None:
            self._world.log(f"{engine.process.name} hangs")
            sleep(_FOREVER)

        self._in_step = happen
        return True

    def _fail_steps(self) -> bool:
        self._step_error = StepFailedError
        self._num_failing_steps += self._random.choice((1, 1, 2, 4))
        return False  # counted when it happens

    def _refuse_memory(self) -> bool:
        self._step_error, self._num_failing_steps = MemoryError, 1
        return True

    def _stop_engine(self) -> bool:
        engine = self._system.engine
        if engine is None or not engine.process.is_alive:
            return False
        engine.process.stop()
        self._world.at(self._world.now + self._random.choice((0.2, 3.0, 30.0, _FOREVER)), engine.process.resume)
        return True

    def _stop_standby(self) -> bool:
        """Stop the process that stands by, for good, and kill the engine, whose place it is to take."""
        standby = self._standby()
        if standby is None:
            return False
        standby.stop()
        return self._kill()

    def _kill_standby(self) -> bool:
        standby = self._standby()
        if standby is None:
            return False
        standby.kill("by a fault")
        return True

    def _standby(self) -> Process | None:
        supervisor = self._system.supervisor
        standby: Any = None if supervisor is None else supervisor._standby.process
        return None if standby is None or standby.ended.is_set() else standby.process

    def _kill_supervisor(self) -> bool:
        operator = self._system.operator
        if operator is None or not operator.process.is_alive:
            return False
        operator.kill()
        return True

    def _fail_starts(self) -> bool:
        self._num_failing_starts = self._random.randint(1, 4)
        if self._kill():
            self.count("engine killed")
        return False  # counted when it happens

    def _begin_crash_loop(self) -> bool:
        return self._kill()

    def _kill_client(self) -> bool:
        client = self._client(may_own=False)
        if client is None:
            return False
        client.process.kill("by a fault")
        return True

    def _stop_client(self) -> bool:
        client = self._client()
        if client is None:
            return False
        client.process.stop()
        self._world.at(self._world.now + self._random.choice((0.5, 4.0, 15.0)), client.process.resume)
        return True

    def _cut(self) -> bool:
        client = self._client()
        if client is None:
            return False
        client.cut()
        return True

    def _stall(self) -> bool:
        client = self._client()
        if client is None:
            return False
        until = self._world.now + self._random.choice((0.2, 2.0, 12.0))
        self._system.network.stalled_until[client.process] = until
        return True

    def _suspend(self) -> bool:
        self._world.suspend(self._random.choice((0.5, 5.0, 60.0, 3600.0)))
        return True

    def _client(self, *, may_own: bool = True) -> SimulatedClient | None:
        clients = [each for each in self._system.clients if each.process.is_alive and (may_own or not each.is_owner)]
        return self._random.choice(clients) if clients else None
