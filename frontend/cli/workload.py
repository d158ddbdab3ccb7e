"""Flags of commands that take a trace, and the workload derived from it."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from quire.frontend.cli.flags import changed, flag_names, option, switch, wrong_usage
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
    """Flags for the part of a trace, and its changes; None means not given."""

    format: Annotated[str | None, _trace("mooncake, azure or burstgpt. Default: detected.", "NAME")] = None
    skip_bad: Annotated[bool, switch("Workload", "--skip-bad", "Skip bad rows, and count them.")] = False
    start: Annotated[float, _trace("Skip the first S seconds of the trace. Default: 0.", "S", min=0)] = 0.0
    duration: Annotated[float | None, _trace("Use only S seconds of the trace. Default: all.", "S", min=0)] = None
    max_requests: Annotated[int | None, _trace("Use only N requests. Default: all.", "N", min=1)] = None
    speed: Annotated[float, _trace("Send requests X times as fast. Default: 1.", "X")] = 1.0
    scale_lengths: Annotated[float, _trace("Make prompts and answers X times as long. Default: 1.", "X")] = 1.0
    scale_output: Annotated[float | None, _trace("Another factor for answers.", "X")] = None
    clip: Annotated[
        bool,
        typer.Option(
            "--clip/--no-clip",
            help="Cut requests to the context length. Default: no; longer ones fail.",
            show_default=False,
            rich_help_panel="Workload",
        ),
    ] = False
    seed: Annotated[int, _trace("Seed of prompt tokens and sampled arrivals. Default: 0.", "N", min=0)] = 0
    vocab_size: Annotated[
        int | None, _trace("Synthetic prompts have ids below N. Default: the model's, or 1000.", "N", min=1)
    ] = None
    rate: Annotated[float | None, _times("Sample arrivals at R requests per second; inf: all at once.", "R")] = None
    burstiness: Annotated[
        float | None, _times("Shape of the gamma distribution of gaps. Default: 1, a Poisson process.", "X")
    ] = None
    ramp_up_start_rps: Annotated[float | None, _times("Rate at the start of a ramp.", "R")] = None
    ramp_up_end_rps: Annotated[float | None, _times("Rate at its end.", "R")] = None
    ramp_up_strategy: Annotated[str | None, _times("linear or exponential. Default: linear.", "NAME")] = None

    @property
    def has_ramp(self) -> bool:
        """True if arrivals follow a ramp."""
        ramp = (self.ramp_up_start_rps, self.ramp_up_end_rps, self.ramp_up_strategy)
        return any(value is not None for value in ramp)

    def check_closed_loop(self) -> None:
        """Reject sampled arrivals in a closed loop, where each user sends when it has its answer."""
        sampled = ("rate", "burstiness", "ramp_up_start_rps", "ramp_up_end_rps", "ramp_up_strategy")
        if given := {name: value for name, value in changed(self).items() if name in sampled}:
            raise typer.BadParameter(
                f"{flag_names(given)} samples arrivals, and with --concurrency requests are sent when answers arrive; "
                "omit one of them, or give --max-concurrency"
            )

    @property
    def extent(self) -> Extent:
        """Extent of the workload, as far as the flags determine it."""
        from quire.frontend.evaluation.replay.load import Extent

        has_own_times = self.rate is None and not self.has_ramp
        seconds = self.duration / self.speed if self.duration is not None and has_own_times else None
        return Extent(self.max_requests, seconds)

    def config(self, trace: Trace) -> dict[str, Any]:
        """Return the trace and its changes, for the report."""
        return {"trace": str(trace.path), "format": trace.format, **self.given}

    @property
    def given(self) -> dict[str, Any]:
        """The flags that differ from their defaults, for the report, where the rate has vLLM's name."""
        return {"request_rate" if name == "rate" else name: value for name, value in changed(self).items()}


def open_trace(path: Path, flags: TraceFlags) -> Trace:
    """Open the trace. Raises `ValueError` that names what is wrong with it."""
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
    """Yield the requests as the flags change them. `max_model_len` is the target's, None if unknown."""
    from quire.frontend.evaluation.workload.arrivals import arrive
    from quire.frontend.evaluation.workload.transforms import clip, scale_lengths, speed_up

    if flags.has_ramp and flags.max_requests is None and trace.is_stream:
        raise typer.BadParameter(
            f"a ramp counts requests before they are sent, and {trace.path} is a pipe, which can be read only "
            "once; give --max-requests"
        )
    requests = iter(trace)
    if flags.speed != 1.0:
        requests = speed_up(requests, flags.speed)
    if flags.scale_lengths != 1.0 or flags.scale_output is not None:
        requests = scale_lengths(requests, flags.scale_lengths, flags.scale_output)
    if flags.clip:
        if max_model_len is None:
            raise typer.BadParameter("the server does not report its context length; give --max-model-len for --clip")
        requests = clip(requests, max_model_len)
    times = arrivals_of(flags, trace)
    return requests if times is None else arrive(requests, times)


def arrivals_of(flags: TraceFlags, requests: Iterable[WorkloadRequest]) -> Iterator[float] | None:
    """Return sampled arrival times, None for the trace's own; `requests` are counted for a ramp of unknown length.

    Raises `BadParameter` for incompatible flags and invalid rates.
    """
    from quire.frontend.evaluation.workload.arrivals import at_rate

    if flags.has_ramp:
        return _ramp(flags, requests)
    if flags.rate is not None:
        if math.isinf(flags.rate) and flags.burstiness not in (None, 1.0):
            raise typer.BadParameter(
                f"--burstiness {flags.burstiness:g} shapes the gaps between requests, and a rate of inf has none; give "
                "another rate, or omit it"
            )
        with wrong_usage():
            return at_rate(flags.rate, _burstiness(flags), flags.seed)
    if flags.burstiness is not None:
        raise typer.BadParameter("--burstiness applies to sampled arrivals; give --rate or a ramp as well")
    return None


def _ramp(flags: TraceFlags, requests: Iterable[WorkloadRequest]) -> Iterator[float]:
    from quire.frontend.evaluation.workload.arrivals import ramp

    start, end, strategy = flags.ramp_up_start_rps, flags.ramp_up_end_rps, flags.ramp_up_strategy or "linear"
    if start is None or end is None or flags.rate is not None:
        raise typer.BadParameter("a ramp takes --ramp-up-start-rps and --ramp-up-end-rps, and no --rate")
    if strategy not in ("linear", "exponential"):
        raise typer.BadParameter(f"--ramp-up-strategy {strategy} is not known; it can be linear or exponential")
    count = flags.max_requests or sum(1 for _ in requests)
    with wrong_usage():
        return ramp(start, end, count, cast("Strategy", strategy), _burstiness(flags), flags.seed)


def _burstiness(flags: TraceFlags) -> float:
    return 1.0 if flags.burstiness is None else flags.burstiness


def note_skipped(trace: Trace, config: dict[str, Any]) -> None:
    """Add the number of skipped rows to the report's configuration, after a run."""
    if trace.num_skipped:
        config["skipped_rows"] = trace.num_skipped


def print_skipped(trace: Trace) -> None:
    """Print the number of skipped rows, and one of the reasons, after a run."""
    if trace.num_skipped:
        say(f"{trace.num_skipped} bad rows of the trace were skipped, for example {trace.reasons[0]}")


def report_skipped(trace: Trace, config: dict[str, Any]) -> None:
    """Report skipped rows both in the configuration and on stderr."""
    note_skipped(trace, config)
    print_skipped(trace)
