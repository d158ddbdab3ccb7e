"""Sections of the page, from top to bottom; each is empty where the reports have nothing for it."""

from __future__ import annotations

from typing import Any

from quire.frontend.evaluation.report import fleet, gantt, numbers, page_tables, timeline
from quire.frontend.evaluation.report.distributions import distribution
from quire.frontend.evaluation.report.figures import goodput_terms, latencies, shortfalls
from quire.frontend.evaluation.report.markup import Markup, tag

NOTHING = Markup("")

Reports = list[dict[str, Any]]


def facts(report: dict[str, Any]) -> str:
    """Return one line: the model, the backend, the duration, the date."""
    model = str(report.get("model_id") or "")
    model = model.rsplit("/", 1)[-1] if model.startswith("/") else model  # the name of a folder is enough
    kind = "simulated" if report.get("simulated") else ""
    words = (model, report.get("backend"), kind, numbers.time(1000 * report["duration"]), date(report))
    return " · ".join(str(word) for word in words if word)


def date(report: dict[str, Any]) -> str:
    """Return the date in ISO form; unchanged if it is not in vLLM's form."""
    text = str(report.get("date") or "")
    if len(text) == 15 and text[8] == "-":
        return f"{text[:4]}-{text[4:6]}-{text[6:8]} {text[9:11]}:{text[11:13]}"
    return text


def overview(reports: Reports) -> Markup:
    """Return the main figures: tiles for one run, a table for several."""
    if len(reports) > 1:
        return tag("section", page_tables.glance(reports), class_="glance")
    report = reports[0]
    tiles = [
        tile("Output", _rate(report, "output_throughput", "tok/s"), _rate(report, "request_throughput", "requests/s")),
        *(
            tile(
                f"{one.label}, median",
                numbers.time(report.get(one.field("median"))),
                f"p99 {numbers.time(report.get(one.field('p99')))}",
            )
            for one in latencies(reports)
            if one.name in {"ttft", "tpot", "e2el"}
        ),
    ]
    if report.get("request_goodput") is not None:
        share = numbers.percent((report.get("goodput_shares") or {}).get("all"))
        tiles.append(tile("Goodput", _rate(report, "request_goodput", "/s"), f"{share} of the requests"))
    tiles.append(tile("Completed", numbers.number(report["completed"]), _others(report)))
    return tag("section", tag("dl", *tiles, class_="tiles"))


def distributions(reports: Reports) -> Markup:
    """Return the distributions of the latency that users see."""
    shown = [
        one
        for one in latencies(reports)
        if one.is_user_visible and any(one.name in (r.get("curves") or {}) for r in reports)
    ]
    figures = [figure(one.label, one.meaning, distribution(reports, one)) for one in shown]
    note = "Cumulative shares; both axes are stretched so that the tail is visible."
    return section("Latency that users see", note, tag("div", *figures, class_="pair")) if figures else NOTHING


def goodput(reports: Reports) -> Markup:
    """Return the shares of requests that met each limit, and all of them."""
    rows = [_goodput(run, report) for run, report in enumerate(reports) if report.get("request_goodput") is not None]
    note = "Share of all requests, failed ones included, that met each limit."
    return section("Goodput", note, tag("div", *rows, class_="pair")) if rows else NOTHING


def timelines(reports: Reports) -> Markup:
    """Return the quantities over time."""
    figures = [figure(panel.title, panel.unit, drawn) for panel, drawn in timeline.panels(reports)]
    return section("Over time", "", tag("div", *figures, class_="three")) if figures else NOTHING


def engines(reports: Reports) -> Markup:
    """Return the load of each engine of a fleet."""
    figures = [
        figure(str(report["title"]), fleet.balance(report), fleet.bars(report), f"wide run{run}")
        for run, report in enumerate(reports)
        if len(report.get("engines") or []) > 1
    ]
    note = "Tokens of prompts and answers by engine; the paler part of a bar was in the prefix cache."
    return section("Engines", note, *figures) if figures else NOTHING


def requests(reports: Reports) -> Markup:
    """Return the Gantt charts of single requests."""
    drawn = [(run, report) for run, report in enumerate(reports) if gantt.kinds(report)]
    if not drawn:
        return NOTHING
    present = {kind for _, report in drawn for kind in gantt.kinds(report)}
    entries = [
        tag("li", tag("i", class_=f"key {kind.replace(' ', '-')}"), words)
        for kind, words in gantt.PHASES.items()
        if kind in present
    ]
    seconds = max(float(report["duration"]) for _, report in drawn)
    longest = max(gantt.longest(report) for _, report in drawn)
    figures = [tag("ul", *entries, class_="legend")]
    for run, report in drawn:
        named = f"{report['title']}: " if len(reports) > 1 else ""
        aligned = gantt.gantt(report, seconds=longest, since_sent=True)
        whole = gantt.gantt(report, seconds=seconds, since_sent=False)
        figures.append(figure(f"{named}each from its sending", gantt.share(report), aligned, f"wide run{run}"))
        figures.append(figure(f"{named}over the run", "", whole, f"wide run{run}"))
    note = "A row for each request, in the order of sending; a dot marks one that did not complete."
    return section("Single requests", note, *figures)


def tables(reports: Reports) -> Markup:
    """Return all figures."""
    latency = page_tables.every_latency(reports[0]) if len(reports) == 1 else NOTHING
    return section("Figures", "", latency, page_tables.every_figure(reports))


def errors(reports: Reports) -> Markup:
    """Return the errors with their counts."""
    found = page_tables.errors(reports)
    return section("Errors", "", found) if found else NOTHING


def configuration(reports: Reports) -> Markup:
    """Return the configurations of the runs."""
    found = page_tables.configuration(reports)
    return section("Configuration", "", found) if found else NOTHING


def section(title: str, note: str, *parts: str) -> Markup:
    """Return parts under a heading, with a note."""
    notes = [tag("p", note, class_="note")] if note else []
    return tag("section", tag("h2", title), *notes, *parts)


def figure(title: str, note: str, drawing: Markup, class_: str | None = None) -> Markup:
    """Return a drawing under its title."""
    caption = tag("figcaption", tag("b", title), " ", tag("small", note))
    return tag("figure", caption, tag("div", drawing, class_="drawing"), class_=class_)


def tile(name: str, value: str, note: str) -> Markup:
    """Return one figure in large type."""
    return tag("div", tag("dt", name), tag("dd", tag("b", value), tag("small", note)))


def _goodput(run: int, report: dict[str, Any]) -> Markup:
    shares = report.get("goodput_shares") or {}
    rate = f"{_rate(report, 'request_goodput', '')}of {_rate(report, 'request_throughput', 'requests/s')}"
    terms = [*goodput_terms(report), f"all limits: {numbers.percent(shares.get('all'))}"]
    bars = [_bar(words, share, run) for words, share in zip(terms, shares.values(), strict=False)]
    return tag("div", tag("h3", str(report["title"]), " ", tag("small", rate)), *bars)


def _bar(words: str, share: float | None, run: int) -> Markup:
    width = f"width: {100 * min(max(share or 0.0, 0.0), 1.0):.4g}%"
    meter = tag("span", tag("i", class_=f"run{run}", style=width), class_="meter")
    return tag("p", tag("span", words), meter, class_="bar")


def _rate(report: dict[str, Any], field: str, unit: str) -> str:
    return f"{numbers.number(report.get(field))} {unit}"


def _others(report: dict[str, Any]) -> str:
    return ", ".join([f"of {numbers.number(report.get('num_prompts'))} requests", *shortfalls(report)])
