"""Figure of a fleet's load by engine."""

from __future__ import annotations

from typing import Any

from quire.frontend.evaluation.report import numbers
from quire.frontend.evaluation.report.markup import Markup, Scale, join, label, linear_ticks, tag

_WIDTH, _HEIGHT = 1000, 190
_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 992, 8, 160


def balance(report: dict[str, Any]) -> str:
    """Say how the load of the busiest engine compares to the mean."""
    loads = [_tokens(engine) for engine in report["engines"]]
    mean = sum(loads) / len(loads)
    return f"{len(loads)} engines; the busiest has {numbers.ratio(max(loads), mean) or '1x'} the mean"


def bars(report: dict[str, Any]) -> Markup:
    """Draw a bar for each engine, in their order: cached tokens on top of computed ones."""
    engines = report["engines"]
    ticks = linear_ticks(max(_tokens(engine) for engine in engines), 3)
    up = Scale(0.0, ticks[-1], _BOTTOM, _TOP)
    pitch = (_RIGHT - _LEFT) / len(engines)
    parts = [_grid(ticks, up)]
    for place, engine in enumerate(engines):
        computed = up(_tokens(engine) - engine["cached_tokens"])
        whole = up(_tokens(engine))
        box = {"x": round(_LEFT + (place + 0.12) * pitch, 1), "width": round(0.76 * pitch, 1)}
        paler = tag("rect", **box, y=whole, height=round(computed - whole, 1), class_="bar-cached")
        solid = tag("rect", **box, y=computed, height=round(_BOTTOM - computed, 1), class_="bar-computed")
        parts.append(tag("g", tag("title", _words(engine)), paler, solid))
    parts.append(label(_LEFT, _BOTTOM + 18, f"engine {engines[0]['engine']}"))
    parts.append(label(_RIGHT, _BOTTOM + 18, f"engine {engines[-1]['engine']}", "end"))
    return tag("svg", *parts, viewBox=f"0 0 {_WIDTH} {_HEIGHT}", role="img", aria_label="Tokens by engine")


def _grid(ticks: list[float], up: Scale) -> Markup:
    parts: list[Markup] = []
    for tick in ticks:
        y = up(tick)
        parts.append(tag("line", x1=_LEFT, x2=_RIGHT, y1=y, y2=y, class_="grid" if tick else "axis"))
        parts.append(label(_LEFT - 7, y + 4, numbers.number(tick), "end"))
    return join(parts)


def _tokens(engine: dict[str, int]) -> int:
    return engine["prompt_tokens"] + engine["output_tokens"]


def _words(engine: dict[str, int]) -> str:
    hits = numbers.percent(engine["cached_tokens"] / engine["prompt_tokens"] if engine["prompt_tokens"] else None)
    return f"engine {engine['engine']}: {engine['requests']:,} requests, {_tokens(engine):,} tokens, {hits} prefix hits"
