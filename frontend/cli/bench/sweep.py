"""`quire bench sweep`."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quire.frontend.cli.bench.flags import BenchTraceFlags, LengthFlags, Workload
from quire.frontend.cli.flags import option, takes_flags
from quire.frontend.cli.output import say, write
from quire.frontend.cli.report import check_writable
from quire.frontend.cli.target import OpenTarget, TargetFlags, open_target
from quire.frontend.cli.workload import report_skipped

if TYPE_CHECKING:
    from quire.frontend.evaluation.bench.rate_search import RateSearch
    from quire.frontend.evaluation.bench.sweep import Rates, Sweep
    from quire.frontend.evaluation.report.goodput import GoodputLimits
    from quire.frontend.evaluation.workload.request import WorkloadRequest

_SECONDS = 30.0
_MIN_PROMPTS = 10  # of a run of --seconds, however low its rate is

_search = functools.partial(option, "Search")
_load = functools.partial(option, "Load")
_report = functools.partial(option, "Report")


@dataclass(frozen=True)
class SweepFlags:
    """Flags for the search, and the length of each run; None means not given."""

    goodput: Annotated[list[str] | None, _search("Limits in milliseconds: ttft:200 tpot:50 e2el:5000.", "LIMIT...")] = (
        None
    )
    attainment: Annotated[float, _search("Share of requests that must meet them. Default: 0.99.", "SHARE")] = 0.99
    low: Annotated[float, _search("First rate, in requests per second. Default: 1.", "R")] = 1.0
    high: Annotated[float | None, _search("Highest rate to try. Default: 1024 times --low.", "R")] = None
    precision: Annotated[
        float, _search("Stop when the highest met and the lowest missed rate are this close. Default: 0.05.", "SHARE")
    ] = 0.05
    num_prompts: Annotated[int | None, _load("Requests of each run, instead of --seconds.", "N", min=1)] = None
    seconds: Annotated[
        float | None, _load("Time of arrivals in each run. Default: 30, at least 10 requests.", "S", min=0)
    ] = None
    burstiness: Annotated[
        float, _load("Shape of the gamma distribution of gaps. Default: 1, a Poisson process.", "X")
    ] = 1.0
    warmup: Annotated[int, _load("Send N unmeasured requests before each run. Default: 8.", "N", min=0)] = 8
    request_timeout: Annotated[float | None, _load("End a request after this time. Default: never.", "S", min=0)] = None
    output: Annotated[Path | None, _report("Write the sweep as JSON, with the reports of all runs.", "FILE")] = None
    html: Annotated[Path | None, _report("Write the sweep as one HTML page with the curve.", "FILE")] = None

    def check(self) -> None:
        """Check the flags before anything is measured. Raises `ValueError`, `OSError` or `BadParameter`."""
        from quire.frontend.evaluation.workload.arrivals import at_rate

        self.search()
        self.limits()
        at_rate(self.low, self.burstiness)
        if self.num_prompts is not None and self.seconds is not None:
            raise typer.BadParameter("--num-prompts and --seconds both say how long a run is; give one of them")
        check_writable("--output", self.output)
        check_writable("--html", self.html)

    def search(self) -> RateSearch:
        """Return the search for the rate."""
        from quire.frontend.evaluation.bench.rate_search import RateSearch

        return RateSearch(self.low, self.high, self.attainment, self.precision)

    def limits(self) -> GoodputLimits:
        """Return the limits that requests must meet."""
        from quire.frontend.evaluation.report.goodput import GoodputLimits

        if not self.goodput:
            raise typer.BadParameter("a sweep needs the limits to meet; give --goodput ttft:MS tpot:MS")
        return GoodputLimits.parse(self.goodput)

    def num_at(self, rate: float) -> int:
        """Return the number of requests of a run at a rate."""
        seconds = _SECONDS if self.seconds is None else self.seconds
        return self.num_prompts or max(_MIN_PROMPTS, math.ceil(rate * seconds))


@takes_flags
def sweep(*, flags: SweepFlags, lengths: LengthFlags, trace: BenchTraceFlags, target: TargetFlags) -> None:
    """Find the highest request rate at which enough requests meet the limits of --goodput.

    The rate doubles from --low until one misses the limits; then the search bisects between the highest met and the
    lowest missed rate until they are within --precision. All runs use one engine or server, each with a warm-up and an
    empty prefix cache; the arrivals are the same, closer together.

    A rate meets the limits if the share --attainment of its requests does, including failed ones. A run that is not
    valid, because requests were sent too late, does not count as met. A rate that misses the share by at most 5 % of
    the requests is tried a second time, and misses if it does so twice. At the end, the lowest rate that missed by more
    is also tried again: if it meets the limits, the search continues from there.

    Runs that are too short find rates that are too high, since a queue needs time to grow. Ctrl-C ends the sweep with
    the results so far.
    """
    flags.check()
    workload = Workload.of(lengths, trace)
    with open_target(target, lengths.vocab_size) as opened:
        found = _sweep(opened, flags, workload)
        try:
            opened.complete(found.run())
        finally:
            _report_on(found, opened, flags, workload)
    if found.best is None:
        raise RuntimeError(found.conclusion)


def _sweep(opened: OpenTarget, flags: SweepFlags, workload: Workload) -> Sweep:
    from quire.frontend.evaluation.bench.sweep import Sweep
    from quire.frontend.evaluation.replay.load import Load

    load = Load(request_timeout=flags.request_timeout or None, warm_up=flags.warmup)
    return Sweep(opened.runs, flags.search(), _rates(opened, flags, workload), load, say, workload.seed)


def _rates(opened: OpenTarget, flags: SweepFlags, workload: Workload) -> Rates:
    from quire.frontend.evaluation.bench.sweep import Rates
    from quire.frontend.evaluation.report.run import Run
    from quire.frontend.evaluation.workload.arrivals import arrive, at_rate

    def requests(rate: float) -> Iterator[WorkloadRequest]:
        made = workload.requests(flags.num_at(rate), opened.context_length)
        return arrive(made, at_rate(rate, flags.burstiness, workload.seed))

    def run(rate: float) -> Run:
        config = opened.config(request_rate=rate, burstiness=flags.burstiness, **workload.config)
        return Run(f"{rate:.4g} requests/s", config, goodput=flags.limits())

    requests(flags.low)  # raises an error if requests do not fit
    return Rates(requests, flags.num_at, run)


def _report_on(found: Sweep, opened: OpenTarget, flags: SweepFlags, workload: Workload) -> None:
    """Save and print the results so far."""
    config = opened.config(
        low=flags.low,
        high=flags.high,
        num_prompts=flags.num_prompts,
        seconds=flags.seconds,
        burstiness=flags.burstiness,
        warmup=flags.warmup,
        **workload.config,
    )
    if workload.trace is not None:
        report_skipped(workload.trace, config)
    if not found.tries:
        return
    from quire.frontend.evaluation.bench.sweep_page import write_page
    from quire.frontend.evaluation.report.files import save_json

    report = found.report(opened.title(f"sweep of {workload.name}"), config)
    if flags.output is not None:
        save_json(report, flags.output)
    if flags.html is not None:
        write_page(report, flags.html)
    if found.best is not None:
        write(f"{found.conclusion}\n")
    if written := [str(path) for path in (flags.output, flags.html) if path is not None]:
        say(f"written: {', '.join(written)}")
