"""An engine process whose model answers at once, or after a while: the rest of its time is the control plane's.

`python -m bench.instant_process NUM_PAGES STEP_SECONDS` prints `READY <address>`, and on SIGTERM, as JSON, what its
parts took in seconds.
"""

from __future__ import annotations

import json
import os
import queue
import resource
import signal
import sys
import threading
import time

from quire.engine_core.engine import EngineCore
from quire.engine_core.executor import PlainStepResult
from quire.engine_core.loop import EngineLoop
from quire.engine_core.planned_executor import PlannedExecutor
from quire.engine_core.process import tune_interpreter
from quire.engine_core.transport.server import ClientLimits, EngineCallbacks, EngineServer, Inbox
from quire.kernels.runner import Sequences, StepInput
from quire.protocol.address import default_address
from quire.protocol.engine_shape import EngineShape
from quire.protocol.messages import PROTOCOL_VERSION, Ready

BLOCK_SIZE, VOCAB_SIZE, CONTEXT = 32, 32_000, 1 << 17
TOKEN = 7


class ConstantExecutor(PlannedExecutor):
    """Executor that always samples the same token, after a while."""

    def __init__(self, num_pages: int, step_seconds: float) -> None:
        super().__init__(Sequences(num_pages, BLOCK_SIZE, VOCAB_SIZE), lambda _slot, _end: TOKEN)
        self._step_seconds = step_seconds

    def submit(self, step: StepInput) -> PlainStepResult:
        """Take the step."""
        if self._step_seconds:
            time.sleep(self._step_seconds)
        return super().submit(step)


class TimedCore(EngineCore):
    """An EngineCore that adds up what the parts of its steps take."""

    seconds = dict.fromkeys(("schedule", "execute", "update", "receive", "whole step"), 0.0)

    def step(self) -> None:
        """One step."""
        begin = time.perf_counter()
        super().step()
        self.seconds["whole step"] += time.perf_counter() - begin
        last = self.last_step
        self.seconds["schedule"] += last.schedule_seconds
        self.seconds["execute"] += last.execute_seconds
        self.seconds["update"] += last.update_seconds

    def receive(self, *arguments: object) -> None:
        """One message."""
        begin = time.perf_counter()
        super().receive(*arguments)  # type: ignore[arg-type]
        self.seconds["receive"] += time.perf_counter() - begin


def main() -> None:
    """Serve until SIGTERM."""
    num_pages = int(sys.argv[1])
    executor = ConstantExecutor(num_pages, float(sys.argv[2]))
    limits = EngineShape(VOCAB_SIZE, CONTEXT, 256, 2048, BLOCK_SIZE, num_pages, max_waiting_requests=1 << 20)
    ready = Ready(
        PROTOCOL_VERSION, "instant", "None", CONTEXT, VOCAB_SIZE, num_pages, BLOCK_SIZE, 256, os.getpid(), 1.0
    )
    inbox: Inbox = queue.SimpleQueue()
    server = EngineServer(default_address(), ready, inbox, ClientLimits())
    core = TimedCore(executor, limits, server.send)
    loop = EngineLoop(core, server, inbox, drain_seconds=1.0)
    signal.signal(signal.SIGTERM, lambda *_: loop.stop())
    server.start(EngineCallbacks(core.reject_early))
    print("READY", server.address, flush=True)
    tune_interpreter()
    loop.run()
    threads = {
        thread.name: time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
        for thread in threading.enumerate()
        if thread.ident
    }
    stats = core.stats
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    report = {"seconds": core.seconds, "cpu": threads, "steps": stats.step, "peak_kib": peak, "held": stats.pages_held}
    print(json.dumps(report), flush=True)
    server.stop()


if __name__ == "__main__":
    main()
