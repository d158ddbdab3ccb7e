"""The flags that benchmarks share."""

from __future__ import annotations

import functools
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quire.frontend.cli.flags import changed, flag_names, option, switch
from quire.frontend.cli.workload import TraceFlags, open_trace, workload_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from quire.frontend.evaluation.workload.reading import Trace
    from quire.frontend.evaluation.workload.request import WorkloadRequest
    from quire.frontend.evaluation.workload.synthetic import RandomWorkload

INPUT_LEN, OUTPUT_LEN = 1024, 128

_made_up = functools.partial(option, "Made-up requests")
_trace = functools.partial(option, "Requests of a trace, in place of made-up ones")


def _length(name: str, text: str, **more: Any) -> Any:
    """A length by both of its names: some commands of vLLM's have --random- before it."""
    return typer.Option(
        f"--{name}",
        f"--random-{name}",
        help=text,
        show_default=False,
        metavar="X" if name == "range-ratio" else "TOKENS",
        rich_help_panel="Made-up requests",
        **more,
    )


@dataclass(frozen=True)
class LengthFlags:
    """How long made-up requests are; what is None was not given."""

    input_len: Annotated[int | None, _length("input-len", "Of a prompt. Default: 1024; for latency 32.", min=1)] = None
    output_len: Annotated[int | None, _length("output-len", "Of an answer. Default: 128.", min=1)] = None
    range_ratio: Annotated[
        float | None, _length("range-ratio", "Lengths are drawn from 1-X to 1+X times these. Default: 0.")
    ] = None
    prefix_len: Annotated[
        int | None, _length("prefix-len", "Of a prefix more, before all prompts the same. Default: 0.", min=0)
    ] = None
    seed: Annotated[int, _made_up("Of lengths, tokens and arrivals. Default: 0.", "N", min=0)] = 0
    vocab_size: Annotated[
        int | None, _made_up("Their tokens have ids below N. Default: the model's, or 1000.", "N", min=1)
    ] = None

    def lengths(self, input_len: int = INPUT_LEN) -> RandomWorkload:
        """What is given, else the defaults."""
        from quire.frontend.evaluation.workload.synthetic import RandomWorkload

        return RandomWorkload(
            self.input_len or input_len, self.output_len or OUTPUT_LEN, self.range_ratio or 0.0, self.prefix_len or 0
        )


@dataclass(frozen=True)
class BenchTraceFlags:
    """Requests of a trace, at other times than its own; what is None was not given."""

    trace: Annotated[Path | None, _trace("Take lengths and shared prefixes from it, as `quire replay`.", "FILE")] = None
    skip_bad: Annotated[
        bool, switch("Requests of a trace, in place of made-up ones", "--skip-bad", "Skip bad rows, and count them.")
    ] = False
    scale_lengths: Annotated[float, _trace("Prompts and answers so many times as long. Default: 1.", "X")] = 1.0
    clip: Annotated[
        bool,
        switch("Requests of a trace, in place of made-up ones", "--clip", "Cut what does not fit the context."),
    ] = False


@dataclass(frozen=True)
class Workload:
    """Requests without their times: made-up ones, or those of a trace."""

    lengths: RandomWorkload
    seed: int
    trace: Trace | None = None
    flags: TraceFlags = field(default_factory=TraceFlags)

    @classmethod
    def of(cls, lengths: LengthFlags, flags: BenchTraceFlags) -> Workload:
        """What the flags say. Raises `BadParameter` if they say both, `ValueError` for a trace that is none."""
        given = changed(flags)
        path = given.pop("trace", None)
        if path is None:
            if given:
                raise typer.BadParameter(f"{flag_names(given)} is of a trace; give one with --trace")
            return cls(lengths.lengths(), lengths.seed)
        of_made_up = ("input_len", "output_len", "range_ratio", "prefix_len")
        if both := {name: value for name, value in changed(lengths).items() if name in of_made_up}:
            raise typer.BadParameter(f"{flag_names(both)} is of made-up requests, --trace has its own; leave out one")
        changes = TraceFlags(seed=lengths.seed, **given)
        return cls(lengths.lengths(), lengths.seed, open_trace(path, changes), changes)

    def requests(self, num: int, max_model_len: int | None) -> Iterable[WorkloadRequest]:
        """At most so many. Raises `ValueError` for made-up ones that do not fit the context."""
        import itertools

        if self.trace is None:
            return self.lengths.requests(num, max_model_len, self.seed)
        return itertools.islice(workload_of(self.trace, self.flags, max_model_len), num)

    @property
    def name(self) -> str:
        """What it is, for a title."""
        if self.trace is not None:
            return self.trace.path.name
        return f"{self.lengths.prefix_len + self.lengths.input_len} to {self.lengths.output_len} tokens"

    @property
    def config(self) -> dict[str, Any]:
        """What it is, for the report."""
        if self.trace is None:
            return {"dataset_name": "random", **asdict(self.lengths), "seed": self.seed}
        return {**self.flags.config(self.trace), "seed": self.seed}
