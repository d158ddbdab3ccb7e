"""`quire bench serve`."""

from __future__ import annotations

import functools
import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from quire.frontend.cli.bench.flags import LengthFlags, Workload
from quire.frontend.cli.bench.reported import reported
from quire.frontend.cli.flags import option, takes_flags
from quire.frontend.cli.report import ReportFlags
from quire.frontend.cli.target import TargetFlags, open_target
from quire.frontend.cli.workload import TraceFlags, arrivals_of

if TYPE_CHECKING:
    from quire.frontend.evaluation.replay.load import Load

_load = functools.partial(option, "Load")


@dataclass(frozen=True)
class ServeFlags:
    """Flags for the arrivals of requests; None means not given."""

    num_prompts: Annotated[int, _load("Number of requests. Default: 1000.", "N", min=1)] = 1000
    request_rate: Annotated[
        float | None,
        typer.Option(
            "--request-rate",
            "--rate",
            help="Requests per second; inf: all at once. Default: inf.",
            show_default=False,
            metavar="R",
            rich_help_panel="Load",
        ),
    ] = None
    burstiness: Annotated[
        float | None, _load("Shape of the gamma distribution of gaps. Default: 1, a Poisson process.", "X")
    ] = None
    max_concurrency: Annotated[
        int | None, _load("Maximum number of open requests; at a rate of inf, a closed loop of N users.", "N", min=1)
    ] = None
    ramp_up_start_rps: Annotated[float | None, _load("Rate at the start of a ramp, instead of R.", "R")] = None
    ramp_up_end_rps: Annotated[float | None, _load("Rate at its end.", "R")] = None
    ramp_up_strategy: Annotated[str | None, _load("linear or exponential. Default: linear.", "NAME")] = None
    warmup: Annotated[
        int,
        typer.Option(
            "--warmup",
            "--num-warmups",
            help="Send N unmeasured requests first. Default: 0.",
            show_default=False,
            metavar="N",
            min=0,
            rich_help_panel="Load",
        ),
    ] = 0
    request_timeout: Annotated[float | None, _load("End a request after this time. Default: never.", "S", min=0)] = None

    def load(self) -> Load:
        """Return the load for the runner."""
        from quire.frontend.evaluation.replay.load import Load

        users = self.max_concurrency if self.rate == math.inf else None
        room = None if users is not None else self.max_concurrency
        return Load(users, room, self.request_timeout or None, self.warmup)

    def arrivals(self, seed: int) -> TraceFlags:
        """Return the arrivals as flags of a replay."""
        return TraceFlags(
            rate=self.rate,
            burstiness=self.burstiness,
            ramp_up_start_rps=self.ramp_up_start_rps,
            ramp_up_end_rps=self.ramp_up_end_rps,
            ramp_up_strategy=self.ramp_up_strategy,
            max_requests=self.num_prompts,
            seed=seed,
        )

    @property
    def rate(self) -> float | None:
        """The rate of requests; None if there is only a ramp."""
        ramp = (self.ramp_up_start_rps, self.ramp_up_end_rps, self.ramp_up_strategy)
        return math.inf if self.request_rate is None and ramp == (None, None, None) else self.request_rate


@takes_flags
def serve(*, flags: ServeFlags, lengths: LengthFlags, report: ReportFlags, target: TargetFlags) -> None:
    """Measure the latency of synthetic requests that arrive at a rate: `quire replay` without a trace.

    The report is that of `quire replay`, and its JSON has the fields of `vllm bench serve --save-result`. A run whose
    requests were sent too late is marked as not valid. Ctrl-C ends the run with the results so far.
    """
    report.check()
    from quire.frontend.evaluation.replay.load import Extent
    from quire.frontend.evaluation.workload.arrivals import arrive

    times = arrivals_of(flags.arrivals(lengths.seed), ())
    assert times is not None, "there is a rate or a ramp"
    workload = Workload(lengths.lengths(), lengths.seed)
    with open_target(target, lengths.vocab_size) as opened:
        requests = workload.requests(flags.num_prompts, opened.context_length)
        given = {**asdict(flags), "request_rate": flags.rate}
        title = opened.title(f"{flags.num_prompts} x {workload.name}")
        run = report.run(title, opened.config(**given, **workload.config))
        load, extent = flags.load(), Extent(flags.num_prompts)
        with reported(run, report, workload, flags.num_prompts):
            opened.measure(run, arrive(requests, times), load, seed=workload.seed, extent=extent, empties_cache=True)
