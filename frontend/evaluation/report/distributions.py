"""Figure of a latency's distribution: the cumulative share of its values."""

from __future__ import annotations

from math import log10
from typing import Any

from quire.frontend.evaluation.report import numbers
from quire.frontend.evaluation.report.figures import Latency
from quire.frontend.evaluation.report.markup import Markup, Scale, join, label, line_path, log_ticks, logit, tag

MARKS = {0.5: "median", 0.9: "p90", 0.99: "p99", 0.999: "p99.9"}

_WIDTH, _HEIGHT = 440, 270
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 428, 12, 240
_WORDS = 56  # pixels for the label next to a dot
_LEAST_SHARE, _MOST_SHARE = 0.03, 0.9997
_LEAST = 1e-3  # ms; less is as good as nothing
_WIDEST = 1e4  # ratio of the ends of the axis: shorter values lie on the border

Point = tuple[float, float]
"""Milliseconds, and the share of the values that are at most this."""


def distribution(reports: list[dict[str, Any]], latency: Latency) -> Markup:
    """Draw the curves of all reports that have one, with marks at `MARKS`, on a scale that shows the tail."""
    curves = [(run, _points(report, latency.name)) for run, report in enumerate(reports)]
    curves = [(run, points) for run, points in curves if points]
    limits = sorted({limit for report in reports for limit in _limits(report, latency)})
    across = _across([ms for _, points in curves for ms, share in points if share >= _LEAST_SHARE] + limits)
    up = Scale(_LEAST_SHARE, _MOST_SHARE, _BOTTOM, _TOP, logit)
    parts = [_grid(across, up)]
    parts += [_curve(run, points, across, up) for run, points in curves]
    parts += [_limit(limit, across, _BOTTOM - 6 - 13 * place) for place, limit in enumerate(limits)]
    parts.append(_marks(reports, curves, latency, across, up))
    named = f"{latency.label}: {latency.meaning}, cumulative"
    return tag("svg", *parts, viewBox=f"0 0 {_WIDTH} {_HEIGHT}", role="img", aria_label=named)


def _points(report: dict[str, Any], name: str) -> list[Point]:
    """Return the curve as far as there are values: ten values have no p99."""
    curves = report.get("curves") or {}
    if name not in curves or not isinstance(curves[name], dict):
        return []
    count, values = curves[name]["count"], curves[name]["ms"]
    points = zip((max(ms, _LEAST) for ms in values), curves.get("shares") or [], strict=False)
    return [(ms, share) for ms, share in points if share <= 1 - 0.5 / max(count, 1)]


def _limits(report: dict[str, Any], latency: Latency) -> list[float]:
    limits: dict[str, float] = report.get("goodput_limits") or {}
    return [limit for name, limit in limits.items() if name == latency.name]


def _across(values: list[float]) -> Scale:
    low, high = min(values, default=1.0) / 1.1, max(values, default=100.0) * 1.1
    return Scale(max(low, high / _WIDEST), high, _LEFT, _RIGHT - _WORDS, log10)


def _grid(across: Scale, up: Scale) -> Markup:
    parts: list[Markup] = []
    for share, name in {0.1: "p10", **MARKS}.items():
        y = up(share)
        parts.append(tag("line", x1=_LEFT, x2=_RIGHT, y1=y, y2=y, class_="grid"))
        parts.append(label(_LEFT - 7, y + 4, name, "end"))
    for tick in log_ticks(across.low, across.high):
        parts.append(tag("line", x1=across(tick), x2=across(tick), y1=_BOTTOM, y2=_BOTTOM + 4, class_="axis"))
        parts.append(label(across(tick), _BOTTOM + 18, numbers.time(tick), "middle"))
    parts.append(tag("line", x1=_LEFT, x2=_RIGHT, y1=_BOTTOM, y2=_BOTTOM, class_="axis"))
    return join(parts)


def _limit(limit: float, across: Scale, y: float) -> Markup:
    x = across(limit)
    line = tag("line", x1=x, x2=x, y1=_TOP, y2=_BOTTOM, class_="limit")
    words = f"limit {numbers.time(limit)}"
    if x > (_LEFT + _RIGHT) / 2:
        return join([line, label(x - 5, y, words, "end", "note")])
    return join([line, label(x + 5, y, words, "start", "note")])


def _curve(run: int, points: list[Point], across: Scale, up: Scale) -> Markup:
    drawn = [(across(ms), up(share)) for ms, share in points if _LEAST_SHARE <= share <= _MOST_SHARE]
    return line_path(drawn, f"curve run{run}")


def _marks(
    reports: list[dict[str, Any]], curves: list[tuple[int, list[Point]]], latency: Latency, across: Scale, up: Scale
) -> Markup:
    """Draw a dot at each percentile of each curve, and labels of the first and the last where they fit."""
    parts: list[Markup] = []
    for share, name in MARKS.items():
        field = latency.field(name)
        found = sorted(
            (float(reports[run][field]), run)
            for run, points in curves
            if reports[run].get(field) is not None and points[-1][1] >= share
        )
        for place, (ms, run) in enumerate(found):
            x, y, time = across(max(ms, _LEAST)), up(share), numbers.time(ms)
            title = tag("title", f"{reports[run]['title']}: {name} {time}")
            parts.append(tag("circle", title, cx=x, cy=y, r=3.6, class_=f"dot run{run}"))
            if place == len(found) - 1:
                parts.append(label(x + 8, y + 14, time, "start", f"value run{run}"))
            elif place == 0 and x > _LEFT + _WORDS:
                parts.append(label(x - 8, y - 5, time, "end", f"value run{run}"))
    return join(parts)
