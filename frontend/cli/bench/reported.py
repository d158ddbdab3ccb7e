"""The common part of the benchmarks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from quire.frontend.cli.output import say
from quire.frontend.cli.report import Report, ReportFlags, report_on
from quire.frontend.cli.workload import report_skipped

if TYPE_CHECKING:
    from quire.frontend.cli.bench.flags import Workload
    from quire.frontend.evaluation.report.run import Run


@contextmanager
def reported(
    run: Run, report: ReportFlags, workload: Workload, num: int, more: Callable[[Report], Report] | None = None
) -> Iterator[None]:
    """Report on a run that sends at most `num` requests of a workload, however it ends.

    `more` derives additional fields of the report.
    """
    try:
        yield
    finally:
        if run.seconds is not None:
            if workload.trace is not None:
                report_skipped(workload.trace, run.config)
                if run.interrupted is None and run.requests < num:
                    say(f"the trace has {run.requests} requests, and {num} were to be sent")
            report_on(run, report, more)
