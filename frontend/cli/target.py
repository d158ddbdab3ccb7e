"""The target that a command measures, and how a run of it ends."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.frontend.cli.flags import AttachFlags, EngineFlags
from quire.frontend.cli.output import say
from quire.frontend.cli.server_flags import ServerFlags

if TYPE_CHECKING:
    import asyncio

    from quire.frontend.evaluation.replay.load import Extent, Load
    from quire.frontend.evaluation.replay.runner import Replay, RunCollector
    from quire.frontend.evaluation.replay.runs import Runs
    from quire.frontend.evaluation.replay.target import Target
    from quire.frontend.evaluation.workload.request import WorkloadRequest


@dataclass(frozen=True)
class TargetFlags:
    """Where requests go: to an HTTP server, to an engine that runs already, or to one of the command's own."""

    server: ServerFlags
    attach: AttachFlags
    engine: EngineFlags


@dataclass(frozen=True)
class OpenTarget:
    """A target, and the event loop that it works on; `runs` makes runs against it.

    `context_length`: what --max-model-len says of a server that does not tell.
    """

    runs: Runs
    loop: asyncio.AbstractEventLoop
    context_length: int | None

    @property
    def target(self) -> Target:
        """What is measured."""
        return self.runs.target

    def title(self, what: str) -> str:
        """What is measured, and the model."""
        return f"{what} on {Path(self.target.info.model).name}"

    def config(self, **more: Any) -> dict[str, Any]:
        """All that one would want to know of how a run was made; less what is None."""
        info = self.target.info
        config = {
            "backend": info.backend,
            "model_id": info.model,
            "target": info.address,
            "max_model_len": info.max_model_len,
            "vocab_size": self.runs.vocab_size,
            **more,
        }
        return {name: value for name, value in config.items() if value is not None}

    def measure(
        self,
        run: RunCollector,
        requests: Iterable[WorkloadRequest],
        load: Load,
        *,
        seed: int,
        extent: Extent,
        empties_cache: bool,
    ) -> None:
        """One run; it shows how it fares. `seed` decides the tokens of its prompts.

        `empties_cache`: begin with an empty prefix cache. Raises as `complete` does, and what reading the workload
        raises.
        """

        def replay() -> Coroutine[Any, Any, str | None]:
            return self.runs.replay(run, requests, load, seed=seed, extent=extent)

        self.complete(afresh(self.runs, replay) if empties_cache else replay())

    def complete(self, work: Coroutine[Any, Any, str | None]) -> None:
        """Make several runs, with other work between; it returns what ended it before its time, if anything did.

        Raises once the work is done, with all that was measured: `KeyboardInterrupt` or `SystemExit` after a signal,
        which ends the run under way, `RuntimeError` when the target has died.
        """
        received: list[signal.Signals] = []
        # Not by `asyncio.Runner.run`: its Ctrl-C would cancel the run before it has been counted to its end.
        reason = self.loop.run_until_complete(_stoppable(self.runs, work, received))
        if received:
            raise KeyboardInterrupt if received[0] is signal.SIGINT else SystemExit(128 + received[0])
        if reason is not None:
            raise RuntimeError(f"the run ended before its time: {reason}")


async def afresh(runs: Runs, work: Callable[[], Awaitable[str | None]]) -> str | None:
    """Do the work with an empty prefix cache: an earlier benchmark may have had the same prompts."""
    if not await runs.target.reset_cache():
        say("the server's prefix cache cannot be emptied; give another --seed each time, or it may know the prompts")
    return await work()


@contextmanager
def open_target(flags: TargetFlags, vocab_size: int | None = None) -> Iterator[OpenTarget]:
    """Find a server, attach to an engine or start one; it is left at the end. `RuntimeError` if there is none.

    `vocab_size`: of made-up prompts, None: the target's.
    """
    import asyncio

    import uvloop

    from quire.frontend.evaluation.replay.runs import Runs

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        loop = runner.get_loop()
        target = _open(loop, flags)
        try:
            runs = Runs(target, vocab_size=vocab_size, shown=_shown)
            yield OpenTarget(runs, loop, flags.engine.max_model_len or target.info.max_model_len)
        finally:
            loop.run_until_complete(target.close())


def _open(loop: asyncio.AbstractEventLoop, flags: TargetFlags) -> Target:
    from quire.frontend.cli.model import engine_options
    from quire.frontend.evaluation.replay.engine_target import EngineTarget
    from quire.frontend.evaluation.replay.http_target import HttpTarget

    if flags.server.base_url is not None:
        options = flags.server.options(flags.engine, flags.attach)
        _allow_connections()
        return loop.run_until_complete(HttpTarget.open(options))
    flags.server.refuse()
    model, arguments = engine_options(flags.engine, flags.attach)
    return EngineTarget.from_options(model, **arguments)


@asynccontextmanager
async def _shown(replay: Replay) -> AsyncIterator[None]:
    """How a run fares while it goes on, and what its figures do not tell."""
    from quire.frontend.evaluation.replay.progress import shown

    async with shown(replay):
        yield
    if replay.cold:
        first = replay.cold[0]
        say(f"{len(replay.cold)} requests of the warm-up did not complete, such as one {first.outcome}: {first.error}")
    if replay.num_short:
        say(f"{replay.num_short} answers are shorter than in the workload: the server does not heed ignore_eos")


async def _stoppable(runs: Runs, work: Coroutine[Any, Any, str | None], received: list[signal.Signals]) -> str | None:
    with _stopping(runs, received):
        return await work


@contextmanager
def _stopping(runs: Runs, received: list[signal.Signals]) -> Iterator[None]:
    """The first signal ends the run, with a report; a second one ends the command."""
    import asyncio

    loop = asyncio.get_running_loop()

    def stop(number: signal.Signals) -> None:
        received.append(number)
        loop.remove_signal_handler(number)
        runs.stop(f"it was stopped by {number.name}")

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
