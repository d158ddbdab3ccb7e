"""Tables of the page."""

from __future__ import annotations

import json
from typing import Any

from quire.frontend.evaluation.report import numbers
from quire.frontend.evaluation.report.figures import STATISTICS, Figure, comparable, latencies
from quire.frontend.evaluation.report.markup import Markup, join, tag

Reports = list[dict[str, Any]]


def table(headings: list[str], rows: list[list[str]], class_: str | None = None) -> Markup:
    """Return a table whose first column names its rows; without a head if there are no headings."""
    head = tag("thead", tag("tr", *(tag("th", heading) for heading in headings))) if headings else Markup("")
    body = [tag("tr", tag("th", row[0], scope="row"), *(tag("td", cell) for cell in row[1:])) for row in rows]
    return tag("div", tag("table", join([head, tag("tbody", *body)]), class_=class_), class_="scroll")


def glance(reports: Reports) -> Markup:
    """Return the main figures of several runs."""
    figures = [
        Figure("output", "output_throughput", "tok/s"),
        *(
            Figure(f"{one.label} {statistic}", one.field(statistic), "time")
            for one in latencies(reports)
            if one.is_user_visible
            for statistic in ("median", "p99")
        ),
        Figure("goodput", "request_goodput", "/s"),
        Figure("completed", "completed"),
    ]
    rows = [
        _cells(figure, reports) for figure in figures if any(figure.value(report) is not None for report in reports)
    ]
    return table(_headings(reports), rows)


def every_latency(report: dict[str, Any]) -> Markup:
    """Return a row for each latency of one run."""
    rows = [
        [one.label, *(numbers.time(report.get(one.field(key))) for key in STATISTICS), one.meaning]
        for one in latencies([report])
    ]
    return table(["", *STATISTICS, ""], rows, "wordy") if rows else Markup("")


def every_figure(reports: Reports) -> Markup:
    """Return a table for each group of figures; of several runs also the latencies, and ratios to the first run."""
    groups = comparable(reports)
    if len(reports) == 1:
        labels = {one.label for one in latencies(reports)}
        groups = {heading: figures for heading, figures in groups.items() if heading not in labels}
    parts = [
        tag("div", tag("h3", heading), table(_headings(reports), [_cells(figure, reports) for figure in figures]))
        for heading, figures in groups.items()
    ]
    return tag("div", *parts, class_="pair" if len(reports) < 3 else None)


def errors(reports: Reports) -> Markup:
    """Return the errors with their counts."""
    named = len(reports) > 1
    rows = [
        [numbers.number(row["count"]), row["outcome"], row["error"], *([str(report["title"])] if named else [])]
        for report in reports
        for row in report.get("error_counts") or []
    ]
    return table(["count", "outcome", "error", *(["run"] if named else [])], rows, "words") if rows else Markup("")


def configuration(reports: Reports) -> Markup:
    """Return the configurations of the runs."""
    configs = [report.get("config") or {} for report in reports]
    rows = [
        [key, *(_value(config.get(key)) for config in configs)]
        for key in dict.fromkeys(key for config in configs for key in config)
    ]
    headings = ["", *(str(report["title"]) for report in reports)] if len(reports) > 1 else []
    return table(headings, rows, "words") if rows else Markup("")


def _cells(figure: Figure, reports: Reports) -> list[str]:
    cells = [figure.label, figure.text(reports[0])]
    for report in reports[1:]:
        cells += [figure.text(report), numbers.ratio(figure.value(report), figure.value(reports[0]))]
    return cells


def _headings(reports: Reports) -> list[str]:
    headings = ["", str(reports[0]["title"])]
    for report in reports[1:]:
        headings += [str(report["title"]), "ratio"]
    return headings if len(reports) > 1 else []


def _value(value: object) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
