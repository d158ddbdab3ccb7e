"""Timelines of runs: a small panel for each quantity, with a line for each run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from quire.frontend.evaluation.report.markup import Markup, Scale, join, label, line_path, linear_ticks, tag, time_ticks

_WIDTH, _HEIGHT = 340, 176
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 332, 10, 150
_MOST_POINTS = 280

Series = list[tuple[float, float | None]]
"""Seconds since the run began, and the quantity; None where it is unknown."""


@dataclass(frozen=True)
class Panel:
    """A quantity over time. `faint` is an optional second line, of which the first is a part."""

    title: str
    unit: str
    series: Callable[[dict[str, Any]], Series]
    faint: Callable[[dict[str, Any]], Series] | None = None
    top: float = 0.0  # the axis reaches at least this value
    is_count: bool = False


def panels(reports: list[dict[str, Any]]) -> list[tuple[Panel, Markup]]:
    """Return the panels for which any of the reports has values."""
    seconds = max((float(report["duration"]) for report in reports), default=0.0)
    drawn = []
    reports_running = all(_reported("running")(report) or not _seen("in_flight")(report) for report in reports)
    for panel in PANELS[1:] if reports_running else PANELS:
        series = [_downsampled(panel.series(report)) for report in reports]
        faint = [_downsampled(panel.faint(report)) if panel.faint else [] for report in reports]
        if any(series):
            drawn.append((panel, _draw(panel, series, faint, seconds)))
    return drawn


def _draw(panel: Panel, series: list[Series], faint: list[Series], seconds: float) -> Markup:
    values = [value for line in (*series, *faint) for _, value in line if value is not None]
    ticks = linear_ticks(max(panel.top, *values, 0.0), whole=panel.is_count)
    across = Scale(0.0, max(seconds, 1e-3), _LEFT, _RIGHT)
    up = Scale(0.0, ticks[-1], _BOTTOM, _TOP)
    parts = [_grid(across, up, ticks)]
    if len(series) == 1:
        parts += [_area(line, across, up) for line in series]
    parts += [_line(line, across, up, f"curve thin faint run{run}") for run, line in enumerate(faint)]
    parts += [_line(line, across, up, f"curve thin run{run}") for run, line in enumerate(series)]
    return tag("svg", *parts, viewBox=f"0 0 {_WIDTH} {_HEIGHT}", role="img", aria_label=f"{panel.title} over time")


def _grid(across: Scale, up: Scale, ticks: list[float]) -> Markup:
    parts: list[Markup] = []
    for tick in ticks:
        parts.append(tag("line", x1=_LEFT, x2=_RIGHT, y1=up(tick), y2=up(tick), class_="grid" if tick else "axis"))
        parts.append(label(_LEFT - 6, up(tick) + 4, _compact(tick), "end"))
    parts += [
        label(across(tick), _BOTTOM + 17, words, "end" if across(tick) > _RIGHT - 12 else "middle")
        for tick, words in time_ticks(across.high, 5)
    ]
    return join(parts)


def _line(series: Series, across: Scale, up: Scale, class_: str) -> Markup:
    points = [None if value is None else (across(time), up(value)) for time, value in series]
    return line_path(points, class_)


def _area(series: Series, across: Scale, up: Scale) -> Markup:
    points = [(across(time), up(value or 0.0)) for time, value in series]
    if len(points) < 2:
        return Markup("")
    return line_path([(points[0][0], _BOTTOM), *points, (points[-1][0], _BOTTOM)], "area run0")


def _downsampled(series: Series) -> Series:
    """Downsample to the highest value of each interval, so that no peak is lost."""
    width = -(-len(series) // _MOST_POINTS)
    if width <= 1:
        return series
    intervals = [series[begin : begin + width] for begin in range(0, len(series), width)]
    return [
        (interval[0][0], max((value for _, value in interval if value is not None), default=None))
        for interval in intervals
    ]


def _compact(value: float) -> str:
    return f"{value / 1000:g}k" if value >= 10_000 else f"{value:,g}"


def _reported(name: str) -> Callable[[dict[str, Any]], Series]:
    """Return a column that the target reports."""

    def series(report: dict[str, Any]) -> Series:
        columns = report.get("timeline") or {}
        rows = zip(columns["time"], columns[name], strict=False) if name in columns and "time" in columns else ()
        return [(time, value) for time, value in rows if time is not None]

    return series


def _seen(name: str) -> Callable[[dict[str, Any]], Series]:
    """Return a column that the clients saw."""

    def series(report: dict[str, Any]) -> Series:
        seen = report.get("client_timeline") or {}
        return list(zip(seen["time"], seen[name], strict=False)) if name in seen and "time" in seen else []

    return series


def _pages(*names: str) -> Callable[[dict[str, Any]], Series]:
    """Return the percentage of pages that are of these kinds together."""

    def series(report: dict[str, Any]) -> Series:
        columns = report.get("timeline") or {}
        if not all(name in columns for name in ("time", "pages_total", *names)):
            return []
        rows = zip(columns["time"], columns["pages_total"], *(columns[name] for name in names), strict=False)
        return [
            (time, 100 * sum(kinds) / total if total and None not in kinds else None)
            for time, total, *kinds in rows
            if time is not None
        ]

    return series


def _hit_rate(report: dict[str, Any]) -> Series:
    """Return the percentage of prompt tokens that were cached, in each of some intervals of the run."""
    columns = report.get("timeline") or {}
    if not all(name in columns for name in ("time", "prompt_tokens", "cached_tokens")):
        return []
    rows = [
        row
        for row in zip(columns["time"], columns["prompt_tokens"], columns["cached_tokens"], strict=False)
        if None not in row
    ]
    rows = rows[:: max(1, len(rows) // 60)]
    series: Series = []
    for (_, prompt, cached), (time, later_prompt, later_cached) in pairwise(rows):
        new = later_prompt - prompt
        series.append((time, min(100.0, max(0.0, 100 * (later_cached - cached) / new)) if new > 0 else None))
    return series


PANELS = (
    # The first is for targets that do not report the second.
    Panel("In flight", "requests, as the client sees it", _seen("in_flight"), top=4),
    Panel("Running", "requests", _reported("running"), top=4, is_count=True),
    Panel("Waiting", "requests", _reported("waiting"), top=4, is_count=True),
    Panel("Output", "tokens/s", _seen("output_tokens_per_s")),
    Panel("Prompts answered", "tokens/s", _seen("prompt_tokens_per_s")),
    Panel("KV pages", "% held; dotted: or cached", _pages("pages_held"), _pages("pages_held", "pages_cached"), 100),
    Panel("Prefix hits", "% of prompt tokens", _hit_rate, top=100),
)
