"""Gantt chart of the phases of single requests."""

from __future__ import annotations

from typing import Any

from quire.frontend.evaluation.report import numbers
from quire.frontend.evaluation.report.markup import Markup, Scale, join, label, tag, time_ticks

PHASES = {
    "queued": "queued",
    "first token": "until the first token (the target reports no phases)",
    "prefill": "prefill",
    "decode": "decode",
    "preempted": "preempted",
}

_WIDTH = 1000
_LEFT, _RIGHT, _TOP = 8, 992, 6
_MOST_ROWS = 125
_LEAST = 0.7  # pixels of a phase that would otherwise be too short to see
_TALLEST, _DRAWING = 14.0, 500.0  # pixels of a row, and of all rows


def gantt(report: dict[str, Any], *, seconds: float, since_sent: bool) -> Markup:
    """Draw the rows over the time of the run, or with `since_sent` aligned at their starts, to compare their lengths.

    The width stands for `seconds`.
    """
    rows = sorted(_rows(report), key=lambda row: float(row["phases"][0][1]))
    height = min(_TALLEST, _DRAWING / max(len(rows), 1))
    bottom = round(_TOP + height * len(rows) + 4, 1)
    across = Scale(0.0, max(seconds, 1e-3), _LEFT, _RIGHT)
    drawn = [
        _row(row, across, _TOP + height * place, height, row["phases"][0][1] if since_sent else 0.0)
        for place, row in enumerate(rows)
    ]
    named = "Phases of single requests" + (", each from its sending" if since_sent else " over the run")
    return tag(
        "svg", _axis(across, bottom), *drawn, viewBox=f"0 0 {_WIDTH} {bottom + 24:g}", role="img", aria_label=named
    )


def longest(report: dict[str, Any]) -> float:
    """Return the seconds of the longest request in the chart."""
    return max((row["phases"][-1][2] - row["phases"][0][1] for row in _rows(report)), default=0.0)


def share(report: dict[str, Any]) -> str:
    """Say which of the requests are in the chart."""
    every = _every(report)
    return "every request" if every == 1 else f"one in {every:,} requests"


def kinds(report: dict[str, Any]) -> list[str]:
    """Return the phases that occur, in the order of a request's life."""
    found = {phase[0] for row in _rows(report) for phase in row["phases"]}
    return [kind for kind in PHASES if kind in found]


def _every(report: dict[str, Any]) -> int:
    """Return the interval between drawn requests, doubled until rows are thick enough to tell apart."""
    kept = report.get("gantt") or {"every": 1, "rows": []}
    every: int = kept["every"]
    while sum(row["index"] % every == 0 for row in kept["rows"]) > _MOST_ROWS:
        every *= 2
    return every


def _rows(report: dict[str, Any]) -> list[dict[str, Any]]:
    every = _every(report)
    kept = (report.get("gantt") or {}).get("rows", [])
    return [row for row in kept if row["phases"] and row["index"] % every == 0]


def _axis(across: Scale, bottom: float) -> Markup:
    parts: list[Markup] = []
    for tick, words in time_ticks(across.high, 8):
        x = across(tick)
        anchor = "start" if x < _LEFT + 12 else "end" if x > _RIGHT - 12 else "middle"
        parts.append(tag("line", x1=x, x2=x, y1=_TOP, y2=bottom, class_="grid"))
        parts.append(label(x, bottom + 16, words, anchor))
    return join(parts)


def _row(row: dict[str, Any], across: Scale, y: float, height: float, begin: float) -> Markup:
    thickness = f"{max(height * 0.78, 1):.3g}"
    bars = [
        tag(
            "rect",
            x=across(start - begin),
            width=round(max(across(end - begin) - across(start - begin), _LEAST), 1),
            height=thickness,
            class_=kind.replace(" ", "-") if kind in PHASES else None,
        )
        for kind, start, end in row["phases"]
    ]
    if row["outcome"] != "completed":
        end = across(row["phases"][-1][2] - begin)
        bars.append(tag("circle", cx=end + 4, cy=round(height / 2, 2), r=2.4, class_="broken"))
    return tag("g", tag("title", _words(row)), *bars, transform=f"translate(0 {y:.1f})")


def _words(row: dict[str, Any]) -> str:
    spent: dict[str, float] = {}
    for kind, begin, end in row["phases"]:
        spent[kind] = spent.get(kind, 0.0) + end - begin
    phases = ", ".join(f"{kind} {numbers.time(1000 * seconds)}" for kind, seconds in spent.items())
    sizes = f"{row['prompt_tokens']:,} + {row['output_tokens']:,} tokens"
    return f"request {row['index']}, {row['outcome']}: {sizes}; {phases}"
