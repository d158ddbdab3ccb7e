"""`quire replay`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from quire.frontend.cli.flags import CommonFlags, changed, flag_names, takes_flags
from quire.frontend.cli.load import LoadFlags
from quire.frontend.cli.report import ReportFlags, compare, report_on
from quire.frontend.cli.target import TargetFlags, open_target
from quire.frontend.cli.workload import TraceFlags, open_trace, tell_skipped, workload_of


@takes_flags
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
    target: TargetFlags,
    common: CommonFlags,
) -> None:
    """Send the requests of a trace to an engine or a server, and report what they felt.

    To an engine of its own, to a running one with --engine-address, or to any OpenAI-compatible server with --base-url.
    Answers are exactly as long as in the trace. The report tells how late requests were sent, and is marked as not
    valid when that was too late. Ctrl-C, or the end of the target, ends the run with what has been measured so far.
    """
    del common
    report.check(num_new=0 if path is None else 1)
    if path is None:
        if not report.compare:
            raise typer.BadParameter("there is nothing to replay; give a TRACE, or --compare with JSON files")
        if given := {**changed(trace), **changed(load)}:
            raise typer.BadParameter(f"{flag_names(given)} is of a replay; give a TRACE, or leave it out")
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
                tell_skipped(rows, run.config)
                report_on(run, report)
