"""Self-contained page of a sweep: the curves, the tries, and the run at the highest rate that met the limits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quire.frontend.evaluation.bench.sweep_figure import Curve, against_rate, goodput_against_rate, points_of
from quire.frontend.evaluation.report import numbers, page_tables, sections
from quire.frontend.evaluation.report.figures import LATENCIES
from quire.frontend.evaluation.report.html import document
from quire.frontend.evaluation.report.markup import Markup, tag
from quire.frontend.whole_file import write_whole

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
