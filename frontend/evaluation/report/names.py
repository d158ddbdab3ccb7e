"""Tells runs of one name apart."""

from __future__ import annotations

from collections import Counter
from typing import Any

_MOST_TERMS = 3


def distinct(reports: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The reports, those of one title renamed by what differs in their configurations, or else numbered."""
    counts = Counter(str(report["title"]) for report in reports)
    names = []
    for report in reports:
        title = str(report["title"])
        alike = [other for other in reports if str(other["title"]) == title]
        names.append(title if counts[title] == 1 else ", ".join([title, *_differences(report, alike)]))
    repeated = {name for name, count in Counter(names).items() if count > 1}
    return [
        {**report, "title": f"{name} (run {number})" if name in repeated else name}
        for number, (report, name) in enumerate(zip(reports, names, strict=True), 1)
    ]


def _differences(report: dict[str, Any], alike: list[dict[str, Any]]) -> list[str]:
    """`speed 2`: what of the report's configuration the others have not, a few words of it."""
    configs = [other.get("config") or {} for other in alike]
    config = report.get("config") or {}
    differing = [key for key, value in config.items() if any(other.get(key) != value for other in configs)]
    return [f"{key.replace('_', ' ')} {config[key]}"[:40] for key in differing[:_MOST_TERMS]]
