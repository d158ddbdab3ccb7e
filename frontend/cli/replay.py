"""`quire replay`."""

from __future__ import annotations

import functools
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quire.frontend.cli.flags import changed, flag_names, option, takes_flags
from quire.frontend.cli.report import ReportFlags, compare, report_on
from quire.frontend.cli.target import TargetFlags, open_target
from quire.frontend.cli.workload import TraceFlags, open_trace, report_skipped, workload_of

if TYPE_CHECKING:
    from quire.frontend.evaluation.replay.load import Load

_load = functools.partial(option, "Load (default: an open loop, each request at its time)")


@dataclass(frozen=True)
class LoadFlags:
    """Flags for the way in which requests are sent; None means not given."""

    concurrency: Annotated[
        int | None, _load("Closed loop: N users, each of which sends when it has its answer.", "N", min=1)
    ] = None
    max_concurrency: Annotated[
        int | None, _load("Open loop with at most N requests at once; waiting for a slot counts as lag.", "N", min=1)
    ] = None
    warmup: Annotated[
        int, _load("Send N unmeasured requests first, and empty the prefix cache. Default: 0.", "N", min=0)
    ] = 0
    request_timeout: Annotated[float | None, _load("End a request after this time. Default: never.", "S", min=0)] = None

    def load(self) -> Load:
        """Return the load for the runner."""
        from quire.frontend.evaluation.replay.load import Load

        if self.concurrency is not None and self.max_concurrency is not None:
            raise typer.BadParameter("--concurrency is a closed loop, --max-concurrency an open one; give one of them")
        return Load(self.concurrency, self.max_concurrency, self.request_timeout or None, self.warmup)

    @property
    def given(self) -> dict[str, Any]:
        """The given flags, for the report, where both kinds of concurrency have vLLM's name."""
        given = {name: value for name, value in asdict(self).items() if value}
        return {**given, "max_concurrency": self.concurrency or self.max_concurrency}


@takes_flags
def replay(
    path: Annotated[
        Path | None,
        typer.Argument(
            metavar="TRACE",
            help="Mooncake JSONL, Azure or BurstGPT CSV, or a recording of `quire serve --record`.",
            show_default=False,
        ),
    ] = None,
    *,
    trace: TraceFlags,
    load: LoadFlags,
    report: ReportFlags,
    target: TargetFlags,
) -> None:
    """Replay a trace on an engine or a server, and report the latency that users see.

    The target is an engine of its own, a running one (--engine-address), or any OpenAI-compatible server (--base-url).
    Answers are exactly as long as in the trace. The report contains the delay with which requests were sent, and is
    marked as not valid if it was too large. Ctrl-C, or the end of the target, ends the run with the results so far.
    """
    report.check(num_new=0 if path is None else 1)
    if path is None:
        if not report.compare:
            raise typer.BadParameter("nothing to replay; give a TRACE, or --compare with JSON files")
        if given := {**changed(trace), **changed(load)}:
            raise typer.BadParameter(f"{flag_names(given)} applies to a replay; give a TRACE, or omit it")
        compare(report)
        return
    if load.concurrency is not None:
        trace.check_closed_loop()
    rows, how = open_trace(path, trace), load.load()
    with open_target(target, trace.vocab_size) as opened:
        run = report.run(opened.title(path.name), opened.config(**trace.config(rows), **load.given))
        try:
            requests = workload_of(rows, trace, opened.context_length)
            opened.measure(run, requests, how, seed=trace.seed, extent=trace.extent, empties_cache=how.warm_up > 0)
        finally:
            if run.seconds is not None:
                report_skipped(rows, run.config)
                report_on(run, report)
