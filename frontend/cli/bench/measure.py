"""The common part of the benchmarks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from quire.frontend.cli.output import say
from quire.frontend.cli.report import Report, ReportFlags, report_on
from quire.frontend.cli.workload import report_skipped

if TYPE_CHECKING:
    from quire.frontend.cli.bench.flags import Workload
    from quire.frontend.cli.target import OpenTarget
    from quire.frontend.evaluation.replay.load import Load
    from quire.frontend.evaluation.report.run import Run
    from quire.frontend.evaluation.workload.request import WorkloadRequest


def measure(
    opened: OpenTarget,
    run: Run,
    requests: Iterable[WorkloadRequest],
    load: Load,
    report: ReportFlags,
    *,
    workload: Workload,
    num: int,
    more: Callable[[Report], Report] | None = None,
) -> None:
    """Send the requests of a workload at their times, and report on the run, however it ends.

    At most `num` requests are sent. `more` derives additional fields of the report. Raises like `OpenTarget.measure`.
    """
    from quire.frontend.evaluation.replay.load import Extent

    try:
        opened.measure(run, requests, load, seed=workload.seed, extent=Extent(num), empties_cache=True)
    finally:
        if run.seconds is not None:
            if workload.trace is not None:
                report_skipped(workload.trace, run.config)
                if run.interrupted is None and run.requests < num:
                    say(f"the trace has {run.requests} requests, and {num} were to be sent")
            report_on(run, report, more)
