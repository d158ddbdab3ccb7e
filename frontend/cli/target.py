"""The target that a command measures, and how a run of it ends."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire.frontend.cli.flags import AttachFlags, EngineFlags
from quire.frontend.cli.output import say
from quire.frontend.cli.server_flags import ServerFlags

if TYPE_CHECKING:
    import asyncio

    from quire.frontend.replay.load import Load
    from quire.frontend.replay.runner import Collector, Replay
    from quire.frontend.replay.target import Target, Tokens
    from quire.frontend.workload.request import WorkloadRequest


@dataclass(frozen=True)
class OpenTarget:
    """A target, and the event loop that it works on."""

    target: Target
    loop: asyncio.AbstractEventLoop

    def measure(self, run: Collector, requests: Iterable[WorkloadRequest], tokens: Tokens, load: Load) -> None:
        """One run; it shows how it fares.

        Raises once `run` has been ended, with all that was measured: `KeyboardInterrupt` or `SystemExit` after a
        signal, `RuntimeError` when the target has died, and what reading the workload raises.
        """
        received: list[signal.Signals] = []
        # Not by `asyncio.Runner.run`: its Ctrl-C would cancel the run before it has been counted to its end.
        reason = self.loop.run_until_complete(_measure(self.target, run, requests, tokens, load, received))
        if received:
            raise KeyboardInterrupt if received[0] is signal.SIGINT else SystemExit(128 + received[0])
        if reason is not None:
            raise RuntimeError(f"the run ended before its time: {reason}")


@contextmanager
def open_target(server: ServerFlags, engine: EngineFlags, attach: AttachFlags) -> Iterator[OpenTarget]:
    """Find a server, attach to an engine or start one; it is left at the end. `RuntimeError` if there is none."""
    import asyncio

    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        loop = runner.get_loop()
        target = _open(loop, server, engine, attach)
        try:
            yield OpenTarget(target, loop)
        finally:
            loop.run_until_complete(target.close())


def _open(loop: asyncio.AbstractEventLoop, server: ServerFlags, engine: EngineFlags, attach: AttachFlags) -> Target:
    from quire.frontend.cli.model import engine_options
    from quire.frontend.replay.engine_target import EngineTarget
    from quire.frontend.replay.http_target import HttpTarget

    if server.base_url is not None:
        options = server.options(engine, attach)
        _allow_connections()
        return loop.run_until_complete(HttpTarget.open(options))
    server.refuse()
    model, arguments = engine_options(engine, attach)
    return EngineTarget.from_options(model, **arguments)


async def _measure(
    target: Target,
    run: Collector,
    requests: Iterable[WorkloadRequest],
    tokens: Tokens,
    load: Load,
    received: list[signal.Signals],
) -> str | None:
    from quire.frontend.replay.progress import shown
    from quire.frontend.replay.runner import Replay

    running = Replay(target, run, tokens, load)
    with _stopping(running, received):
        async with shown(running):
            reason = await running.run(requests)
    if running.num_short:
        say(f"{running.num_short} answers are shorter than in the workload: the server does not heed ignore_eos")
    return reason


@contextmanager
def _stopping(running: Replay, received: list[signal.Signals]) -> Iterator[None]:
    """The first signal ends the run, with a report; a second one ends the command."""
    import asyncio

    loop = asyncio.get_running_loop()

    def stop(number: signal.Signals) -> None:
        received.append(number)
        loop.remove_signal_handler(number)
        running.stop(f"it was stopped by {number.name}")

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:  # as under nohup
            loop.add_signal_handler(number, stop, number)
    try:
        yield
    finally:
        for number, handler in before.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)


def _allow_connections() -> None:
    """Every request under way has a connection, and so a file descriptor: allow as many as may be."""
    import resource

    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
