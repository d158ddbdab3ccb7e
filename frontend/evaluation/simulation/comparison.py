"""Comparison of routers: a table and a figure."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

_PANELS = (
    ("output_throughput", 1.0, "output tokens per second", "{:,.0f}"),
    ("prefix_hit_rate", 100.0, "cache hits, % of prompt tokens", "{:.0f}"),
    ("median_ttft_ms", 1e-3, "TTFT p50, seconds", "{:.2f}"),
    ("p99_ttft_ms", 1e-3, "TTFT p99, seconds", "{:.1f}"),
)


def router_table(reports: dict[str, dict[str, Any]], imbalances: dict[str, float]) -> Table:
    """Return a row for each router. The last column is the busy time of the busiest engine, relative to the mean."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("router", no_wrap=True)
    for heading in ("req/s", "tok/s", "hits", "TTFT\np50 s", "\np99 s", "TPOT\np50 ms", "\np99 ms", "busiest"):
        table.add_column(heading, justify="right", no_wrap=True)
    for router, report in reports.items():
        table.add_row(router, *_cells(report), f"{imbalances[router]:.2f}")
    return table


def _cells(report: dict[str, Any]) -> list[str]:
    figures = (
        ("request_throughput", 1.0, "{:.2f}"),
        ("output_throughput", 1.0, "{:,.0f}"),
        ("prefix_hit_rate", 1.0, "{:.1%}"),
        ("median_ttft_ms", 1e-3, "{:.2f}"),
        ("p99_ttft_ms", 1e-3, "{:.2f}"),
        ("median_tpot_ms", 1.0, "{:.1f}"),
        ("p99_tpot_ms", 1.0, "{:.1f}"),
    )
    return [_text(report.get(name), factor, form) for name, factor, form in figures]


def _text(value: float | None, factor: float, form: str) -> str:
    return "-" if value is None else form.format(value * factor)


def draw_routers(reports: dict[str, dict[str, Any]], path: Path) -> None:
    """Draw bars for each router. Raises ValueError without matplotlib, or for an unknown file extension."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError("--figure needs matplotlib; `pip install matplotlib` brings it") from error
    figure = Figure(figsize=(11, 0.6 + 0.4 * len(reports)), layout="constrained")
    names = list(reports)[::-1]
    for axis, (field, factor, title, form) in zip(figure.subplots(1, len(_PANELS), sharey=True), _PANELS, strict=True):
        values = [(reports[name].get(field) or 0.0) * factor for name in names]
        bars = axis.barh(names, values, height=0.6, color="#4477aa")
        axis.bar_label(bars, labels=[f" {form.format(value)}" for value in values], fontsize="small")
        axis.set_title(title, fontsize="medium", loc="left")
        axis.set_xlim(0, 1.3 * max([*values, 1e-9]))
        axis.set_xticks([])
        axis.tick_params(left=False)
        axis.spines[["top", "right", "bottom"]].set_visible(False)
    try:
        figure.savefig(path, dpi=150)
    except ValueError as error:
        raise ValueError(f"--figure {path}: {error}") from error
