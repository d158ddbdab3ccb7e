"""Flags that benchmarks share."""

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

_synthetic = functools.partial(option, "Synthetic requests")
_trace = functools.partial(option, "Requests of a trace, in place of synthetic ones")


def _length(name: str, text: str, **more: Any) -> Any:
    """Return the flag of a length under both of its names: some commands of vLLM put --random- before it."""
    return typer.Option(
        f"--{name}",
        f"--random-{name}",
        help=text,
        show_default=False,
        metavar="X" if name == "range-ratio" else "TOKENS",
        rich_help_panel="Synthetic requests",
        **more,
    )


@dataclass(frozen=True)
class LengthFlags:
    """Lengths of synthetic requests; None means not given."""

    input_len: Annotated[
        int | None, _length("input-len", "Tokens of a prompt. Default: 1024; for latency 32.", min=1)
    ] = None
    output_len: Annotated[int | None, _length("output-len", "Tokens of an answer. Default: 128.", min=1)] = None
    range_ratio: Annotated[
        float | None, _length("range-ratio", "Lengths are uniform from 1-X to 1+X times these. Default: 0.")
    ] = None
    prefix_len: Annotated[
        int | None, _length("prefix-len", "Tokens of a prefix that all prompts share, in addition. Default: 0.", min=0)
    ] = None
    seed: Annotated[int, _synthetic("Seed of lengths, tokens and arrivals. Default: 0.", "N", min=0)] = 0
    vocab_size: Annotated[
        int | None, _synthetic("Token ids are below N. Default: the model's, or 1000.", "N", min=1)
    ] = None

    def lengths(self, input_len: int = INPUT_LEN) -> RandomWorkload:
        """Return the lengths that were given, else the defaults."""
        from quire.frontend.evaluation.workload.synthetic import RandomWorkload

        return RandomWorkload(
            self.input_len or input_len, self.output_len or OUTPUT_LEN, self.range_ratio or 0.0, self.prefix_len or 0
        )


@dataclass(frozen=True)
class BenchTraceFlags:
    """Requests of a trace, at other times than its own; None means not given."""

    trace: Annotated[Path | None, _trace("Take lengths and shared prefixes from it, as `quire replay`.", "FILE")] = None
    skip_bad: Annotated[
        bool, switch("Requests of a trace, in place of synthetic ones", "--skip-bad", "Skip bad rows, and count them.")
    ] = False
    scale_lengths: Annotated[float, _trace("Multiply the lengths of prompts and answers. Default: 1.", "X")] = 1.0
    clip: Annotated[
        bool,
        switch(
            "Requests of a trace, in place of synthetic ones", "--clip", "Cut requests that do not fit the context."
        ),
    ] = False


@dataclass(frozen=True)
class Workload:
    """Requests without their times: synthetic ones, or those of a trace."""

    lengths: RandomWorkload
    seed: int
    trace: Trace | None = None
    flags: TraceFlags = field(default_factory=TraceFlags)

    @classmethod
    def of(cls, lengths: LengthFlags, flags: BenchTraceFlags) -> Workload:
        """Return the workload. Raises `BadParameter` for flags of both kinds, `ValueError` for a bad trace."""
        given = changed(flags)
        path = given.pop("trace", None)
        if path is None:
            if given:
                raise typer.BadParameter(f"{flag_names(given)} belongs to a trace; give one with --trace")
            return cls(lengths.lengths(), lengths.seed)
        of_synthetic = ("input_len", "output_len", "range_ratio", "prefix_len")
        if both := {name: value for name, value in changed(lengths).items() if name in of_synthetic}:
            raise typer.BadParameter(
                f"{flag_names(both)} belongs to synthetic requests, and --trace has its own; leave one out"
            )
        changes = TraceFlags(seed=lengths.seed, **given)
        return cls(lengths.lengths(), lengths.seed, open_trace(path, changes), changes)

    def requests(self, num: int, max_model_len: int | None) -> Iterable[WorkloadRequest]:
        """Return at most `num` requests. Raises `ValueError` for synthetic ones that do not fit the context."""
        import itertools

        if self.trace is None:
            return self.lengths.requests(num, max_model_len, self.seed)
        return itertools.islice(workload_of(self.trace, self.flags, max_model_len), num)

    @property
    def name(self) -> str:
        """Name of the workload, for a title."""
        if self.trace is not None:
            return self.trace.path.name
        return f"{self.lengths.prefix_len + self.lengths.input_len} to {self.lengths.output_len} tokens"

    @property
    def config(self) -> dict[str, Any]:
        """Description of the workload, for the report."""
        if self.trace is None:
            return {"dataset_name": "random", **asdict(self.lengths), "seed": self.seed}
        return {**self.flags.config(self.trace), "seed": self.seed}
