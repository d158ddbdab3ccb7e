"""An operator: runs the supervisor of an engine in a process of its own, as `quire engine` does, again and again."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from fault_simulation.world import Process, Thread, World
from quire.frontend.client.supervisor import Supervisor
from quire.frontend.errors import EngineStartError

_AGAIN_SECONDS = (0.3, 2.0, 20.0)  # until another one is started


class Operator:
    """The supervisor that clients are attached to the engine of, and those that follow it."""

    def __init__(self, world: World, start_supervisor: Callable[[Process], Supervisor], *, is_patient: bool) -> None:
        """`is_patient`: start one again that has given up."""
        self.supervisor: Supervisor | None = None
        self.is_done = False
        self.has_given_up = False
        self._world = world
        self._start_supervisor = start_supervisor
        self._is_patient = is_patient
        self._is_closing = False
        self._num_processes = 0
        self._begin()

    def kill(self) -> None:
        """Kill the supervisor alone; its engine learns of that from the kernel."""
        self.process.kill("by a fault")
        self._again()

    def close(self) -> None:
        """Have the supervisor end its engine; `is_done` then."""
        self._is_closing = True
        Thread(self.process, "close", self._close).start()

    def _begin(self) -> None:
        if self._is_closing:
            self.is_done = True
            return
        self._num_processes += 1
        self.process = Process(self._world, f"supervisor {self._num_processes}")
        Thread(self.process, "main", self._main).start()

    def _again(self) -> None:
        self._world.at(self._world.now + self._world.random.choice(_AGAIN_SECONDS), self._begin)

    def _main(self) -> None:
        try:
            self.supervisor = supervisor = self._start_supervisor(self.process)
            supervisor.wait_ready()
            supervisor.join()
        except EngineStartError as error:
            self._world.log(f"the engine cannot be started: {error}")
        if self._is_closing:
            return
        if self.supervisor is not None:
            self.supervisor.stop()
        if not self._is_patient:
            self.has_given_up = True
        else:
            self.process.after(0.0, partial(self.process.kill, "it has given up"))
            self._again()

    def _close(self) -> None:
        if self.supervisor is not None:
            self.supervisor.stop()
        self.is_done = True
