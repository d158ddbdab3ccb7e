"""`quire replay`."""

from __future__ import annotations

import functools
import signal
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quire.frontend.cli.flags import AttachFlags, CommonFlags, EngineFlags, option, takes
from quire.frontend.cli.output import say
from quire.frontend.cli.report import ReportFlags, compare, report_on
from quire.frontend.cli.server_flags import ServerFlags
from quire.frontend.cli.workload import TraceFlags, open_trace, workload_of

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Iterable

    from quire.frontend.replay.load import Load
    from quire.frontend.replay.runner import Replay
    from quire.frontend.replay.target import Target
    from quire.frontend.report.run import Run
    from quire.frontend.workload.reading import Trace
    from quire.frontend.workload.request import WorkloadRequest

_load = functools.partial(option, "Load (default: an open loop, each request at its time)")
_FEW_TOKENS = 1000  # that every model has, for servers that do not tell how many


@dataclass(frozen=True)
class LoadFlags:
    """How requests are sent; what is None was not given."""

    concurrency: Annotated[
        int | None, _load("A closed loop: so many users, each sends when it has its answer.", "N", min=1)
    ] = None
    max_concurrency: Annotated[
        int | None, _load("An open loop of at most so many at once; the wait for room counts as lag.", "N", min=1)
    ] = None
    warmup: Annotated[
        int, _load("Send so many before, in no figure, and empty the prefix cache. Default: 0.", "N", min=0)
    ] = 0
    request_timeout: Annotated[float | None, _load("End a request after so long. Default: never.", "S", min=0)] = None
    vocab_size: Annotated[
        int | None, _load("Made-up prompts have ids below N. Default: the model's, or 1000.", "N", min=1)
    ] = None

    def load(self) -> Load:
        """What the runner takes."""
        from quire.frontend.replay.load import Load

        if self.concurrency is not None and self.max_concurrency is not None:
            raise typer.BadParameter("--concurrency is a closed loop, --max-concurrency an open one; give one of them")
        return Load(self.concurrency, self.max_concurrency, self.request_timeout or None, self.warmup)


@takes(
    trace=TraceFlags,
    load=LoadFlags,
    report=ReportFlags,
    server=ServerFlags,
    attach=AttachFlags,
    engine=EngineFlags,
    common=CommonFlags,
)
def replay(
    path: Annotated[
        Path | None,
        typer.Argument(
            metavar="TRACE",
            help="Mooncake JSONL, Azure or BurstGPT CSV, or what `quire serve --record` wrote.",
            show_default=False,
        ),
    ] = None,
    *,
    trace: TraceFlags,
    load: LoadFlags,
    report: ReportFlags,
    server: ServerFlags,
    attach: AttachFlags,
    engine: EngineFlags,
    common: CommonFlags,
) -> None:
    """Send the requests of a trace to an engine or a server, and report what they felt.

    To an engine of its own, to a running one with --address, or to any OpenAI-compatible server with --base-url.
    Answers are exactly as long as in the trace. The report tells how late requests were sent, and is marked as not
    valid when that was too late. Ctrl-C, or the end of the target, ends the run with what has been measured so far.
    """
    del common
    report.check()
    if path is None:
        if not report.compare:
            raise typer.BadParameter("there is nothing to replay; give a TRACE, or --compare with JSON files")
        compare(report)
        return
    workload = open_trace(path, trace)
    load.load()
    _replay(_Command(workload, trace, load, report, server), engine, attach)


@dataclass(frozen=True)
class _Command:
    """What was asked for, less the target."""

    trace: Trace
    flags: TraceFlags
    load: LoadFlags
    report: ReportFlags
    server: ServerFlags

    def requests(self, target: Target) -> Iterable[WorkloadRequest]:
        return workload_of(self.trace, self.flags, target.info.max_model_len)

    def run(self, target: Target) -> Run:
        """What collects the run, with all that one would want to know of how it was made."""
        info = target.info
        config = {
            "backend": info.backend,
            "model_id": info.model,
            "target": info.address,
            "max_model_len": info.max_model_len,
            "trace": str(self.trace.path),
            "format": self.trace.format,
            **self.flags.given,
            **{name: value for name, value in asdict(self.load).items() if value},
            "vocab_size": self.vocab_size(target),
            "request_rate": self.flags.rate,
            "burstiness": self.flags.burstiness,
            "max_concurrency": self.load.concurrency or self.load.max_concurrency,
        }
        title = f"{self.trace.path.name} on {Path(info.model).name}"
        return self.report.run(title, {name: value for name, value in config.items() if value is not None})

    def vocab_size(self, target: Target) -> int:
        return self.load.vocab_size or target.info.vocab_size or _FEW_TOKENS


def _replay(command: _Command, engine: EngineFlags, attach: AttachFlags) -> None:
    import asyncio

    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        loop = runner.get_loop()
        target = _open(loop, command.server, engine, attach)
        try:
            run = command.run(target)
            received: list[signal.Signals] = []
            try:
                # Not by `runner.run`: its Ctrl-C would cancel the run before it has been counted to its end.
                reason = loop.run_until_complete(_measure(command, target, run, received))
            finally:
                if run.seconds is not None:
                    _tell_skipped(command.trace, run)
                    report_on(run, command.report)
        finally:
            loop.run_until_complete(target.close())
    if received:
        raise KeyboardInterrupt if received[0] is signal.SIGINT else SystemExit(128 + received[0])
    if reason is not None:
        raise RuntimeError(f"the run ended before its time: {reason}")


def _open(loop: asyncio.AbstractEventLoop, server: ServerFlags, engine: EngineFlags, attach: AttachFlags) -> Target:
    """The target. Raises `RuntimeError` if there is none."""
    from quire.frontend.cli.model import engine_options
    from quire.frontend.replay.engine_target import EngineTarget
    from quire.frontend.replay.http_target import HttpTarget

    if server.base_url is not None:
        _allow_connections()
        return loop.run_until_complete(HttpTarget.open(server.options(engine, attach)))
    server.refuse()
    model, options = engine_options(engine, attach)
    return EngineTarget.from_options(model, **options)


async def _measure(command: _Command, target: Target, run: Run, received: list[signal.Signals]) -> str | None:
    from quire.frontend.replay.progress import shown
    from quire.frontend.replay.runner import Replay
    from quire.frontend.workload.prompts import Prompts

    info = target.info
    prompts = Prompts(command.vocab_size(target), command.flags.seed, avoid=info.special_token_ids)
    running = Replay(target, run, prompts.tokens, command.load.load())
    _stop_on_signals(running, received)
    async with shown(running):
        return await running.run(command.requests(target))


def _stop_on_signals(running: Replay, received: list[signal.Signals]) -> None:
    """The first signal ends the run, with a report; a second one ends the command."""
    import asyncio

    loop = asyncio.get_running_loop()

    def stop(number: signal.Signals) -> None:
        received.append(number)
        loop.remove_signal_handler(number)
        running.stop(f"it was stopped by {number.name}")

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            loop.add_signal_handler(number, stop, number)


def _tell_skipped(trace: Trace, run: Run) -> None:
    if trace.num_skipped:
        run.config["skipped_rows"] = trace.num_skipped
        say(f"{trace.num_skipped} bad rows of the trace were skipped, such as {trace.reasons[0]}")


def _allow_connections() -> None:
    """Every request under way has a connection, and so a file descriptor: allow as many as may be."""
    import resource

    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
