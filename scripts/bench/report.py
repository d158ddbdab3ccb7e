"""Table and figure of the results."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from bench.bandwidth import PASSES, SIZE
from bench.builds import header
from bench.engines import BenchError
from bench.samples import Samples, WorkSamples
from rich import box
from rich.console import Console
from rich.table import Table

WIDTH = 160  # columns of the table without a terminal


def show(results: list[WorkSamples]) -> None:
    """Print what was compared, and the table: a row for each work and engine, ratios to each configuration of Quire."""
    for line in header(samples.engine.build for samples in results[0].engines):
        print(line)
    ours = [samples.engine.name for samples in results[0].best() if samples.engine.ours]
    ratios = ours if len(results[0].best()) > 1 else []
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("work", "engine"):
        table.add_column(heading, no_wrap=True)
    for heading in ("tok/s", "min", "max", "of limit", *(f"{name} / it" for name in ratios)):
        table.add_column(heading, justify="right")
    for result in results:
        best = result.best()
        for number, samples in enumerate(best):
            name = "" if number else result.work.name
            table.add_row(name, *_cells(result, samples), *_ratios(samples, best if ratios else []))
        table.add_section()
    console = Console(highlight=False)
    console.width = console.width if console.is_terminal else WIDTH
    console.print(table)
    for note in _notes(results):
        print(note)


def _cells(result: WorkSamples, samples: Samples) -> list[str]:
    limit = result.limit(samples.engine)
    share = "" if limit is None else f"{samples.median / limit:.0%}"
    rates = [samples.median, min(samples.rates), max(samples.rates)]
    return [samples.engine.full_name, *map(_number, rates), share]


def _ratios(samples: Samples, best: list[Samples]) -> list[str]:
    return ["" if ours is samples else f"{ours.ratio_to(samples):.2f}" for ours in best if ours.engine.ours]


def _number(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.1f}"


def _notes(results: list[WorkSamples]) -> list[str]:
    notes = ["Medians; a ratio is the median of the repetitions' ratios. Of variants the fastest is shown."]
    bandwidths = [statistics.median(result.bandwidths) for result in results if result.bandwidths]
    if bandwidths:
        notes.append(
            "The limit is the time to read, in each step, all weights and the KV of all tokens at "
            f"{min(bandwidths) / 1e9:.1f} to {max(bandwidths) / 1e9:.1f} GB/s: the speed at which the same threads "
            f"read {SIZE >> 30} GiB in the same turns (best of {PASSES} passes). A model that fits into the caches can "
            "exceed it."
        )
    return notes


def save_figure(results: list[WorkSamples], path: Path) -> None:
    """Draw a panel for each work: bars with their spread, and the limit. Needs matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise BenchError("--figure needs matplotlib; `pip install matplotlib` brings it") from error
    figure = Figure(figsize=(1 + 1.8 * len(results), 4), layout="constrained")
    for axis, result in zip(figure.subplots(1, len(results), squeeze=False)[0], results, strict=True):
        _draw(axis, result)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    figure.axes[0].set_ylabel("tokens per second")
    try:
        figure.savefig(path, dpi=150)
    except ValueError as error:  # an extension that matplotlib does not know
        raise BenchError(f"--figure {path}: {error}") from error


def _draw(axis: Any, result: WorkSamples) -> None:
    for number, samples in enumerate(result.best()):
        spread = [[samples.median - min(samples.rates)], [max(samples.rates) - samples.median]]
        axis.bar(number, samples.median, yerr=spread, capsize=3, color=f"C{number}", label=samples.engine.name)
        limit = result.limit(samples.engine)
        if limit is not None:
            axis.hlines(limit, number - 0.4, number + 0.4, colors="black", linestyles="dashed", linewidth=1)
    axis.set_title(result.work.name, fontsize="medium")
    axis.set_xticks([])
    axis.spines[["top", "right"]].set_visible(False)
