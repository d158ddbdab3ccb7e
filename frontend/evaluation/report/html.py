"""Self-contained HTML page of reports: no scripts, no other files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quire.frontend.evaluation.report import sections
from quire.frontend.evaluation.report.figures import verdict, with_distinct_titles
from quire.frontend.evaluation.report.markup import Markup, join, tag
from quire.frontend.whole_file import write_whole

_STYLES = (Path(__file__).parents[2] / "page" / "theme.css", Path(__file__).with_name("page.css"))
MOST_RUNS = 6
"""Number of runs for which a page has colours."""


def write_html(reports: list[dict[str, Any]], path: Path) -> None:
    """Write the page of one run, or of several overlaid. Raises OSError, and ValueError for none or too many."""
    write_whole(path, page(reports))


def page(reports: list[dict[str, Any]]) -> str:
    """Return the page."""
    if not 1 <= len(reports) <= MOST_RUNS:
        raise ValueError(f"a page shows 1 to {MOST_RUNS} runs, {len(reports)} were given")
    reports = with_distinct_titles(reports)
    title = " · ".join(str(report["title"]) for report in reports)
    body = [
        _header(reports),
        sections.overview(reports),
        sections.distributions(reports),
        sections.goodput(reports),
        sections.timelines(reports),
        sections.engines(reports),
        sections.requests(reports),
        sections.tables(reports),
        sections.errors(reports),
        sections.configuration(reports),
    ]
    return document(title, *body)


def document(title: str, *body: str) -> str:
    """Return a page with this body, in the style of reports."""
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", title),
        *(tag("style", Markup(style.read_text(encoding="utf-8"))) for style in _STYLES),
    )
    return "<!doctype html>\n" + tag("html", head, tag("body", tag("main", *body)), lang="en") + "\n"


def _header(reports: list[dict[str, Any]]) -> Markup:
    if len(reports) == 1:
        parts = [tag("h1", str(reports[0]["title"])), tag("p", sections.facts(reports[0]), class_="facts")]
    else:
        parts = [tag("h1", f"{len(reports)} runs compared"), _legend(reports)]
    return tag("header", *parts, *(_warning(report) for report in reports if verdict(report) is not None))


def _legend(reports: list[dict[str, Any]]) -> Markup:
    entries = [
        tag(
            "li",
            tag("i", class_=f"key run{run}"),
            tag("b", str(report["title"])),
            " ",
            tag("span", sections.facts(report), class_="facts"),
        )
        for run, report in enumerate(reports)
    ]
    return tag("ul", *entries, class_="legend runs")


def _warning(report: dict[str, Any]) -> Markup:
    name = tag("b", f"Not valid: {report['title']}. ")
    return tag("p", join([name, str(verdict(report))]), class_="warning")
