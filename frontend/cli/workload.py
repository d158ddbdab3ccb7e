"""The flags of commands that take a trace, and the workload that they make of it."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from quire.frontend.cli.flags import changed, flag_names, option, switch
from quire.frontend.cli.output import say

if TYPE_CHECKING:
    from quire.frontend.evaluation.replay.load import Extent
    from quire.frontend.evaluation.workload.arrivals import Strategy
    from quire.frontend.evaluation.workload.reading import Trace
    from quire.frontend.evaluation.workload.request import WorkloadRequest

_trace = functools.partial(option, "Workload")
_times = functools.partial(option, "Arrivals (default: the trace's)")


@dataclass(frozen=True)
class TraceFlags:
    """Which part of a trace, and how it is changed; what is None was not given."""

    format: Annotated[str | None, _trace("mooncake, azure or burstgpt. Default: as its first line shows.", "NAME")] = (
        None
    )
    skip_bad: Annotated[bool, switch("Workload", "--skip-bad", "Skip bad rows, and count them.")] = False
    start: Annotated[float, _trace("Leave out the trace's first seconds. Default: 0.", "S", min=0)] = 0.0
    duration: Annotated[float | None, _trace("Only so many seconds of the trace. Default: all.", "S", min=0)] = None
    max_requests: Annotated[int | None, _trace("Only so many requests. Default: all.", "N", min=1)] = None
    speed: Annotated[float, _trace("Send them so many times as fast. Default: 1.", "X")] = 1.0
    scale_lengths: Annotated[float, _trace("Prompts and answers so many times as long. Default: 1.", "X")] = 1.0
    scale_output: Annotated[float | None, _trace("Answers, where it is to be another factor.", "X")] = None
    clip: Annotated[
        bool,
        typer.Option(
            "--clip/--no-clip",
            help="Cut what does not fit the context. Default: no; such requests fail.",
            show_default=False,
            rich_help_panel="Workload",
        ),
    ] = False
    seed: Annotated[int, _trace("Of the prompts' tokens and of drawn arrivals. Default: 0.", "N", min=0)] = 0
    vocab_size: Annotated[
        int | None, _trace("Made-up prompts have ids below N. Default: the model's, or 1000.", "N", min=1)
    ] = None
    rate: Annotated[float | None, _times("Requests a second, drawn anew; inf: all at once.", "R")] = None
    burstiness: Annotated[
        float | None, _times("Shape of the gamma distribution of gaps. Default: 1, a Poisson process.", "X")
    ] = None
    ramp_up_start_rps: Annotated[float | None, _times("Rate at the beginning of a ramp.", "R")] = None
    ramp_up_end_rps: Annotated[float | None, _times("Rate at its end.", "R")] = None
    ramp_up_strategy: Annotated[str | None, _times("linear or exponential. Default: linear.", "NAME")] = None

    @property
    def has_ramp(self) -> bool:
        """Whether arrivals are those of a ramp."""
        ramp = (self.ramp_up_start_rps, self.ramp_up_end_rps, self.ramp_up_strategy)
        return any(value is not None for value in ramp)

    def check_closed_loop(self) -> None:
        """Refuse drawn arrivals where each user sends when it has its answer."""
        drawn = ("rate", "burstiness", "ramp_up_start_rps", "ramp_up_end_rps", "ramp_up_strategy")
        if given := {name: value for name, value in changed(self).items() if name in drawn}:
            raise typer.BadParameter(
                f"{flag_names(given)} draws arrivals, and with --concurrency requests are sent when answers are there; "
                "leave one of them out, or give --max-concurrency"
            )

    @property
    def extent(self) -> Extent:
        """How long the workload is, as far as they tell."""
        from quire.frontend.evaluation.replay.load import Extent

        has_own_times = self.rate is None and not self.has_ramp
        seconds = self.duration / self.speed if self.duration is not None and has_own_times else None
        return Extent(self.max_requests, seconds)

    def config(self, trace: Trace) -> dict[str, Any]:
        """Which trace it is and what is done to it, for the report."""
        return {"trace": str(trace.path), "format": trace.format, **self.given}

    @property
    def given(self) -> dict[str, Any]:
        """Those that differ from their defaults, for the report, where the rate has vLLM's name."""
        return {"request_rate" if name == "rate" else name: value for name, value in changed(self).items()}


def open_trace(path: Path, flags: TraceFlags) -> Trace:
    """The trace. Raises `ValueError` that names what is wrong with it."""
    from quire.frontend.evaluation.workload.reading import read_trace

    return read_trace(
        path,
        format=flags.format,
        skip_bad=flags.skip_bad,
        start=flags.start,
        duration=flags.duration,
        max_requests=flags.max_requests,
    )


def workload_of(trace: Trace, flags: TraceFlags, max_model_len: int | None) -> Iterator[WorkloadRequest]:
    """The requests as the flags want them. `max_model_len`: of the target, where it tells."""
    from quire.frontend.evaluation.workload.arrivals import arrive
    from quire.frontend.evaluation.workload.transforms import clip, scale_lengths, speed_up

    if flags.has_ramp and flags.max_requests is None and trace.is_stream:
        raise typer.BadParameter(
            f"a ramp counts the requests before it sends them, and {trace.path} is a pipe, which can be read only "
            "once; give --max-requests"
        )
    requests = iter(trace)
    if flags.speed != 1.0:
        requests = speed_up(requests, flags.speed)
    if flags.scale_lengths != 1.0 or flags.scale_output is not None:
        requests = scale_lengths(requests, flags.scale_lengths, flags.scale_output)
    if flags.clip:
        if max_model_len is None:
            raise typer.BadParameter("the server does not tell its context length; give --max-model-len for --clip")
        requests = clip(requests, max_model_len)
    times = arrivals_of(flags, trace)
    return requests if times is None else arrive(requests, times)


def arrivals_of(flags: TraceFlags, requests: Iterable[WorkloadRequest]) -> Iterator[float] | None:
    """The times that the flags draw, None where they draw none; `requests` are counted for a ramp without their number.

    Raises `BadParameter` for flags that do not go together, and `ValueError` for rates that are none.
    """
    from quire.frontend.evaluation.workload.arrivals import at_rate

    if flags.has_ramp:
        return _ramp(flags, requests)
    if flags.rate is not None:
        if math.isinf(flags.rate) and flags.burstiness not in (None, 1.0):
            raise typer.BadParameter(
                f"--burstiness {flags.burstiness:g} is of the gaps between requests, and a rate of inf has none; give "
                "another rate, or leave it out"
            )
        return at_rate(flags.rate, _burstiness(flags), flags.seed)
    if flags.burstiness is not None:
        raise typer.BadParameter("--burstiness is of drawn arrivals; give --rate or a ramp as well")
    return None


def _ramp(flags: TraceFlags, requests: Iterable[WorkloadRequest]) -> Iterator[float]:
    from quire.frontend.evaluation.workload.arrivals import ramp

    start, end, strategy = flags.ramp_up_start_rps, flags.ramp_up_end_rps, flags.ramp_up_strategy or "linear"
    if start is None or end is None or flags.rate is not None:
        raise typer.BadParameter("a ramp takes --ramp-up-start-rps and --ramp-up-end-rps, and no --rate")
    if strategy not in ("linear", "exponential"):
        raise typer.BadParameter(f"--ramp-up-strategy {strategy} is not known; it can be linear or exponential")
    count = flags.max_requests or sum(1 for _ in requests)
    return ramp(start, end, count, cast("Strategy", strategy), _burstiness(flags), flags.seed)


def _burstiness(flags: TraceFlags) -> float:
    return 1.0 if flags.burstiness is None else flags.burstiness


def note_skipped(trace: Trace, config: dict[str, Any]) -> None:
    """After a run: note in the report's configuration how many bad rows were skipped."""
    if trace.num_skipped:
        config["skipped_rows"] = trace.num_skipped


def say_skipped(trace: Trace) -> None:
    """After a run: say how many bad rows were skipped, and what was wrong with one."""
    if trace.num_skipped:
        say(f"{trace.num_skipped} bad rows of the trace were skipped, such as {trace.reasons[0]}")


def tell_skipped(trace: Trace, config: dict[str, Any]) -> None:
    """Both."""
    note_skipped(trace, config)
    say_skipped(trace)
