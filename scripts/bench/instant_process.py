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
from collections.abc import Sequence

from quire.engine_core.engine import EngineCore
from quire.engine_core.executor import Branch, PlainStepResult, UnconstrainedExecutor
from quire.engine_core.loop import EngineLoop
from quire.engine_core.process import tune_interpreter
from quire.engine_core.transport.server import EngineServer, Inbox
from quire.kernels.runner import Sequences
from quire.protocol.address import default_address
from quire.protocol.engine_shape import EngineShape
from quire.protocol.messages import PROTOCOL_VERSION, Ready

BLOCK_SIZE, VOCAB_SIZE, CONTEXT = 32, 32_000, 1 << 17
TOKEN = 7


class ConstantExecutor(UnconstrainedExecutor):
    """Executor with real sequences, pages and prefix cache that always samples the same token."""

    def __init__(self, num_pages: int, step_seconds: float) -> None:
        self.step_seconds = step_seconds
        self.sequences = Sequences(num_pages, BLOCK_SIZE, VOCAB_SIZE)

    def fork(self, slot: int, source: int, num_computed: int, num_tokens: int) -> bool:
        """Fork the sequences; there is no KV to copy."""
        return self.sequences.fork(slot, source, num_computed, num_tokens)

    def step(
        self,
        slots: list[int],
        starts: list[int],
        counts: list[int],
        num_drafts: list[int] | None = None,
        branches: Sequence[Branch] = (),
    ) -> PlainStepResult:
        """Update tokens and the prefix cache as a model's runner does, and compute nothing."""
        assert num_drafts is None
        assert not branches
        sequences = self.sequences
        if self.step_seconds:
            time.sleep(self.step_seconds)
        spans: list[list[int]] = []
        for slot, start, count in zip(slots, starts, counts, strict=True):
            end = start + count
            is_last = end == sequences.num_tokens(slot)
            if is_last:
                sequences.append(slot, TOKEN)
            spans.append([TOKEN] if is_last else [])
            if end // BLOCK_SIZE > start // BLOCK_SIZE:
                sequences.share(slot, end)
        return PlainStepResult(spans)


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
    server = EngineServer(default_address(), ready, inbox)
    core = TimedCore(executor, limits, server.send)
    loop = EngineLoop(core, server, inbox, drain_seconds=1.0)
    signal.signal(signal.SIGTERM, lambda *_: loop.stop())
    server.start(core.reject_early)
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
