"""Results of the kernel benchmark: times compared with their limits, as tables and as a figure."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from quire.kernels.work import Work

HEADINGS = (
    "kernel", "shape", "rows", "context", "us", "+-", "GB/s", "of memory", "GOP/s", "of peak", "limit", "share",
    "torch us", "torch / us",
)  # fmt: skip


@dataclass(frozen=True)
class KernelResult:
    """One kernel in one step. `seconds` is the median over repetitions of one launch, from `least` to `most`; `bounds`
    are its lower bounds by limit, in seconds; `launches` is the number of launches in a step; `torch_seconds` is the
    time of torch's f32 GEMM of the same shape, if it was measured."""

    kernel: str
    shape: str
    step: str
    rows: int
    context: int
    launches: int
    seconds: float
    least: float
    most: float
    bytes: int
    operations: int
    unit: str
    bounds: dict[str, float]
    torch_seconds: float | None

    @property
    def limit(self) -> str:
        """Binding limit: the largest of the lower bounds."""
        return max(self.bounds, key=self.bounds.__getitem__)

    @property
    def bound(self) -> float:
        """Fewest seconds that a launch could take."""
        return self.bounds[self.limit]


@dataclass(frozen=True)
class StepTotal:
    """A whole step: the sum over its launches, without sampling. `shares` are by kernel."""

    step: str
    rows: int
    context: int
    seconds: float
    bound: float
    launches: int
    launch_seconds: float
    shares: dict[str, float]


def bounds_of(work: Work, limits: dict[str, float], cache_bytes: int) -> dict[str, float]:
    """Return lower bounds of a launch's seconds. Activations that exceed half of the cache come from memory too."""
    total = work.memory + work.activations
    from_memory = total if work.activations > cache_bytes // 2 else work.memory
    bounds = {"memory": from_memory / limits["memory"], "cache": total / limits["cache"], "launch": limits["launch"]}
    if work.operations and work.unit in limits:
        bounds[work.unit] = work.operations / limits[work.unit]
    return bounds


def total_of(results: list[KernelResult], launch_seconds: float) -> StepTotal:
    """Return the sum over the kernels of one step."""
    first = max(results, key=lambda result: result.rows)
    seconds = sum(r.seconds * r.launches for r in results)
    launches = sum(r.launches for r in results)
    shares = {r.kernel: r.seconds * r.launches / seconds for r in results}
    bound = sum(r.bound * r.launches for r in results)
    context = max(r.context for r in results)
    return StepTotal(
        first.step, first.rows, context, seconds, bound, launches, launches * launch_seconds,
        dict(sorted(shares.items(), key=lambda item: -item[1])),
    )  # fmt: skip


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f} %"


def _cells(r: KernelResult) -> tuple[str, ...]:
    context = f"{r.context} {r.step}" if r.context else ""
    rate = f"{r.operations / r.seconds / 1e9:.1f}" if r.operations else ""
    peak = _percent(r.bounds[r.unit], r.seconds) if r.unit in r.bounds else ""
    return (
        r.kernel, r.shape, str(r.rows), context, f"{r.seconds * 1e6:.1f}", _percent((r.most - r.least) / 2, r.seconds),
        f"{r.bytes / r.seconds / 1e9:.1f}", _percent(r.bounds["memory"], r.seconds),
        rate, peak, r.limit, _percent(r.bound, r.seconds),
        *((f"{r.torch_seconds * 1e6:.1f}", f"{r.torch_seconds / r.seconds:.2f}") if r.torch_seconds else ("", "")),
    )  # fmt: skip


def table(results: list[KernelResult]) -> str:
    """Format a line for each result, without the columns that are empty."""
    rows = [_cells(result) for result in results]
    used = [i for i in range(len(HEADINGS)) if any(row[i] for row in rows)]
    lines = [[line[i] for i in used] for line in (HEADINGS, *rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    left = {i for i, number in enumerate(used) if HEADINGS[number] in ("kernel", "shape", "limit")}
    return "\n".join(
        "  ".join(
            cell.ljust(w) if i in left else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )


def step_text(total: StepTotal) -> str:
    """Format a paragraph about a whole step."""
    what = f"batch {total.rows} at context" if total.step == "decode" else f"chunk of {total.rows} of a prompt of"
    shares = ", ".join(f"{name} {100 * share:.1f} %" for name, share in total.shares.items())
    return (
        f"{total.step} step, {what} {total.context}: {total.seconds * 1e3:.2f} ms, "
        f"{total.rows / total.seconds:.1f} tokens/s, {_percent(total.bound, total.seconds)} of the sum of its limits; "
        f"{total.launches} launches cost {total.launch_seconds * 1e3:.2f} ms "
        f"({_percent(total.launch_seconds, total.seconds)})\n    {shares}"
    )


def figure(results: list[KernelResult], path: str, title: str) -> None:
    """Draw a panel for each kernel: bars of its share of the binding limit, coloured by that limit, over rows."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    names = list(dict.fromkeys(r.kernel for r in results))
    limits = list(dict.fromkeys(r.limit for r in results))
    colours = dict(zip(limits, plt.get_cmap("tab10").colors, strict=False))
    columns = min(3, len(names))
    lines = -(-len(names) // columns)
    canvas, axes = plt.subplots(lines, columns, figsize=(6 * columns, 2.6 * lines), squeeze=False, sharey=True)
    for name, axis in zip(names, axes.flat, strict=False):
        chosen = [r for r in results if r.kernel == name]
        labels = [f"{r.rows}" + (f"\n{r.step[0]} {r.context}" if r.context else "") for r in chosen]
        axis.bar(
            range(len(chosen)), [100 * r.bound / r.seconds for r in chosen], color=[colours[r.limit] for r in chosen]
        )
        axis.set_xticks(range(len(chosen)), labels, fontsize=6)
        axis.set_title(f"{name} ({chosen[0].shape})", fontsize=9)
        axis.axhline(100, color="black", linewidth=0.5)
    for axis in axes.flat[len(names) :]:
        axis.set_visible(False)
    handles = [plt.Rectangle((0, 0), 1, 1, color=colours[limit]) for limit in limits]
    canvas.legend(handles, [f"bound by {limit}" for limit in limits], loc="lower center", ncols=len(limits))
    canvas.suptitle(title)
    canvas.supylabel("share of the limit, %")
    canvas.tight_layout(rect=(0.02, 0.04, 1, 1))
    canvas.savefig(path, dpi=150)


def spread(samples: list[float]) -> dict[str, float]:
    """Return median, least and most."""
    return {"median": statistics.median(samples), "least": min(samples), "most": max(samples)}
