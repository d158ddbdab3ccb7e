"""Self-contained page of a sweep: the curves, the tries, and the run at the highest rate that met the limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log10
from pathlib import Path
from typing import Any

from quire.frontend.evaluation.report import numbers, page_tables, sections
from quire.frontend.evaluation.report.figures import LATENCIES
from quire.frontend.evaluation.report.html import document
from quire.frontend.evaluation.report.markup import Markup, Scale, join, label, line_path, linear_ticks, log_ticks, tag
from quire.frontend.whole_file import write_whole

_WIDTH, _HEIGHT = 440, 270
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 428, 14, 240
_LEAST = 1e-3  # ms; less is as good as nothing

Point = tuple[float, float | None, bool]
"""Requests a second, the quantity (None where there is none), and True if the rate met the limits."""


@dataclass(frozen=True)
class Curve:
    """A quantity of each try, in the order of the rates; `key` is the CSS class, which has a colour."""

    name: str
    key: str
    points: Sequence[Point]


def against_rate(curves: Sequence[Curve], *, limit: float | None, best: float | None, named: str) -> Markup:
    """Draw milliseconds on a logarithmic scale, with their limit; `best` is the highest rate that met the limits."""
    values = [max(value, _LEAST) for curve in curves for _, value, _ in curve.points if value is not None]
    known = values + ([] if limit is None else [limit])
    low, high = min(known, default=1.0) / 1.4, max(known, default=1.0) * 1.4
    up = Scale(low, high, _BOTTOM, _TOP, log10)
    ticks = [(tick, numbers.time(tick)) for tick in log_ticks(low, high)]
    above = [] if limit is None else _limit(up(limit), f"limit {numbers.time(limit)}")
    return _draw(curves, up, ticks, above, best, named)


def goodput_against_rate(curve: Curve, *, best: float | None, named: str) -> Markup:
    """Draw requests a second on a linear scale, with the line on which all of them would be good."""
    rates = [rate for rate, _, _ in curve.points]
    ticks = linear_ticks(max(rates))
    up = Scale(0.0, ticks[-1], _BOTTOM, _TOP)
    across = _across([curve])
    all_good = line_path([(across(0.0), up(0.0)), (across(max(rates)), up(max(rates)))], "limit")
    words = label(across(max(rates) / 2) - 6, up(max(rates) / 2) - 4, "all good", "end", "tick")
    return _draw([curve], up, [(tick, f"{tick:g}") for tick in ticks], [all_good, words], best, named)


def _across(curves: Sequence[Curve]) -> Scale:
    return Scale(0.0, max(rate for curve in curves for rate, _, _ in curve.points) * 1.03, _LEFT, _RIGHT)


def _draw(
    curves: Sequence[Curve],
    up: Scale,
    ticks: Sequence[tuple[float, str]],
    above: Sequence[Markup],
    best: float | None,
    named: str,
) -> Markup:
    across = _across(curves)
    parts = [_grid(across, up, ticks), *above, *(_curve(curve, across, up) for curve in curves)]
    if best is not None:
        x = across(best)
        parts.insert(1, tag("line", x1=x, x2=x, y1=_TOP, y2=_BOTTOM, class_="axis"))
        parts.append(label(x - 5, _TOP + 10, f"{best:.4g}/s", "end", "tick"))
    return tag("svg", *parts, viewBox=f"0 0 {_WIDTH} {_HEIGHT}", role="img", aria_label=named)


def _grid(across: Scale, up: Scale, ticks: Sequence[tuple[float, str]]) -> Markup:
    parts = []
    for tick, words in ticks:
        parts.append(tag("line", x1=_LEFT, x2=_RIGHT, y1=up(tick), y2=up(tick), class_="grid"))
        parts.append(label(_LEFT - 6, up(tick) + 4, words, "end"))
    parts.append(tag("line", x1=_LEFT, x2=_RIGHT, y1=_BOTTOM, y2=_BOTTOM, class_="axis"))
    parts += [
        label(across(rate), _BOTTOM + 17, f"{rate:g}", "middle")
        for rate in linear_ticks(across.high, 6)
        if rate <= across.high
    ]
    return join(parts)


def _curve(curve: Curve, across: Scale, up: Scale) -> Markup:
    places = [(across(rate), up(value), rate, value, met) for rate, value, met in curve.points if value is not None]
    last = {x: y for x, y, *_ in places}  # the last try at a rate counts
    line = line_path(last.items(), f"curve {curve.key}")
    dots = [
        tag("circle", _hint(curve, rate, value, met), cx=x, cy=y, r=3.6, class_=f"dot {curve.key if met else 'broken'}")
        for x, y, rate, value, met in places
    ]
    return join([line, *dots])


def _hint(curve: Curve, rate: float, value: float, met: bool) -> Markup:
    return tag("title", f"{curve.name} at {rate:.4g} requests/s: {value:.4g}{'' if met else ', not met'}")


def _limit(y: float, words: str) -> list[Markup]:
    line = tag("line", x1=_LEFT, x2=_RIGHT, y1=y, y2=y, class_="limit")
    return [line, label(_LEFT + 4, y - 4, words, "start", "note")]


def points_of(report: dict[str, Any], field: str) -> list[Point]:
    """Return a field of each run of a sweep's report, in the order of rates; runs at the same rate keep their order."""
    tries = zip(report["tries"], report["runs"], strict=True)
    points = [(each["request_rate"], run.get(field), each["met"]) for each, run in tries]
    return sorted(points, key=lambda point: point[0])


_LATENCIES = ("ttft", "tpot", "e2el")


def write_page(report: dict[str, Any], path: Path) -> None:
    """Write the page of a sweep's report, which has at least one try. Raises OSError."""
    write_whole(path, page(report))


def page(report: dict[str, Any]) -> str:
    """Return the page."""
    best = _best(report)
    body = [_header(report), _overview(report), _figures(report), _tries(report)]
    if best is not None:
        body += [
            tag("h2", f"The run at {best['title']}"),
            sections.overview([best]),
            sections.distributions([best]),
            sections.timelines([best]),
            sections.errors([best]),
        ]
    body.append(sections.configuration([report]))
    return document(str(report["title"]), *body)


def _best(report: dict[str, Any]) -> dict[str, Any] | None:
    """Return the report of the run at the highest rate that met the limits."""
    rate = report["highest_rate"]
    tries = zip(report["tries"], report["runs"], strict=True)
    return next((run for each, run in tries if each["met"] and each["request_rate"] == rate), None)


def _header(report: dict[str, Any]) -> Markup:
    words = (report["model_id"], report["backend"], sections.date(report))
    facts = " · ".join(str(word) for word in words if word)
    parts = [tag("h1", str(report["title"])), tag("p", facts, class_="facts")]
    if report["interrupted"] is not None or report["highest_rate"] is None:
        return tag("header", *parts, tag("p", str(report["conclusion"]), class_="warning"))
    return tag("header", *parts, tag("p", str(report["conclusion"])))


def _overview(report: dict[str, Any]) -> Markup:
    labels = {one.name: one.label for one in LATENCIES}
    limits = ", ".join(
        f"{labels[name]} ≤ {numbers.time(limit)}" for name, limit in (report["goodput_limits"] or {}).items()
    )
    rate = report["highest_rate"]
    tiles = [
        sections.tile("Highest rate", f"{numbers.number(rate)} /s", f"within {numbers.percent(report['precision'])}"),
        sections.tile("Limits", numbers.percent(report["attainment"]), f"of the requests: {limits}"),
        sections.tile("Tries", str(len(report["tries"])), f"{sum(each['met'] for each in report['tries'])} met"),
    ]
    return tag("section", tag("dl", *tiles, class_="tiles"))


def _figures(report: dict[str, Any]) -> Markup:
    best, limits = report["highest_rate"], report["goodput_limits"] or {}
    goodput = Curve("goodput", "run0", points_of(report, "request_goodput"))
    figures = [
        sections.figure("Goodput", "requests/s", goodput_against_rate(goodput, best=best, named="goodput by rate"))
    ]
    for one in LATENCIES:
        curves = [
            Curve(f"{one.label} {statistic}", key, points_of(report, one.field(statistic)))
            for statistic, key in (("median", "run0"), ("p99", "run1"))
        ]
        is_known = any(value is not None for curve in curves for _, value, _ in curve.points)
        if is_known and (one.name in ("ttft", "tpot") or one.name in limits):
            drawn = against_rate(curves, limit=limits.get(one.name), best=best, named=f"{one.label} by rate")
            figures.append(sections.figure(one.label, one.meaning, drawn))
    keys = (
        ("--run0", "median"),
        ("--run1", "p99"),
        ("--danger", "the rate missed the limits, or the run is not valid"),
    )
    legend = [tag("li", tag("i", class_="key", style=f"background: var({colour})"), words) for colour, words in keys]
    note = "Each dot is a run, at the requests a second that were sent."
    parts = [tag("ul", *legend, class_="legend"), tag("div", *figures, class_="pair")]
    return sections.section("By the rate of requests", note, *parts)


def _tries(report: dict[str, Any]) -> Markup:
    rows = [
        [
            f"{each['request_rate']:.4g}",
            "met" if each["met"] else "missed" if each["valid"] else "not valid",
            numbers.percent(each["share"]),
            numbers.number(run["num_prompts"]),
            numbers.number(run["request_goodput"]),
            *(numbers.time(run[f"{statistic}_{name}_ms"]) for name in _LATENCIES for statistic in ("median", "p99")),
        ]
        for each, run in zip(report["tries"], report["runs"], strict=True)
    ]
    labels = {one.name: one.label for one in LATENCIES}
    spread = [f"{labels[name]} {statistic}" for name in _LATENCIES for statistic in ("median", "p99")]
    headings = ["requests/s", "", "share", "requests", "goodput/s", *spread]
    return sections.section("Tries, in their order", "", page_tables.table(headings, rows))
