"""Figures of reports: their labels, fields and units, and the titles of runs that are compared."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, Literal

from quire.frontend.evaluation.report import numbers

Unit = Literal["", "/s", "tok/s", "time", "share", "seconds"]


@dataclass(frozen=True)
class Figure:
    """A number of a report: its label, field and unit. `time` is in milliseconds, `share` from 0 to 1."""

    label: str
    field: str
    unit: Unit = ""

    def value(self, report: dict[str, Any]) -> float | None:
        """Return the number; None where the report has none."""
        value = report.get(self.field)
        return value if isinstance(value, int | float) and not isinstance(value, bool) else None

    def text(self, report: dict[str, Any]) -> str:
        """Return the number as text with its unit."""
        value = self.value(report)
        if self.unit == "time":
            return numbers.time(value)
        if self.unit == "seconds":
            return numbers.time(None if value is None else 1000 * value)
        if self.unit == "share":
            return numbers.percent(value)
        return numbers.number(value) + (f" {self.unit}" if self.unit and value is not None else "")


@dataclass(frozen=True)
class Latency:
    """A latency of a report. Users see the first ones; the others are the engine's own."""

    name: str
    label: str
    meaning: str
    is_user_visible: bool = False

    def field(self, statistic: str) -> str:
        """Return the field with a statistic of it, such as `p99`, in milliseconds."""
        return f"{statistic}_{self.name}_ms"


LATENCIES = (
    Latency("ttft", "TTFT", "time to the first token", is_user_visible=True),
    Latency("tpot", "TPOT", "time per output token after the first", is_user_visible=True),
    Latency("itl", "ITL", "from each token to the next, 0 if they came together", is_user_visible=True),
    Latency("e2el", "E2E", "time to the last token", is_user_visible=True),
    Latency("gap", "Gap", "from each increment to the next, whatever its tokens: vLLM's ITL"),
    Latency("queue", "Queue", "from queued to first scheduled"),
    Latency("prefill", "Prefill", "from first scheduled to the first token"),
    Latency("decode", "Decode", "from the first token to the last"),
)
_MOST_TERMS = 3  # of a configuration in a title
STATISTICS = ("mean", "median", "p90", "p99", "p99.9", "max")

REQUESTS = (
    Figure("requests", "num_prompts"),
    Figure("completed", "completed"),
    Figure("failed", "failed"),
    Figure("with an error", "errored"),
    Figure("refused", "refused"),
    Figure("late", "late"),
    Figure("unfinished", "unfinished"),
    Figure("short answers", "short_answers"),
    Figure("warm-up", "warm_up"),
    Figure("most in flight", "max_concurrent_requests"),
    Figure("preemptions", "preemptions"),
)
THROUGHPUT = (
    Figure("duration", "duration", "seconds"),
    Figure("requests", "request_throughput", "/s"),
    Figure("goodput", "request_goodput", "/s"),
    Figure("output", "output_throughput", "tok/s"),
    Figure("prompts and output", "total_token_throughput", "tok/s"),
    Figure("best second", "max_output_tokens_per_s", "tok/s"),
)
TOKENS = (
    Figure("of prompts", "total_input_tokens"),
    Figure("of answers", "total_output_tokens"),
    Figure("of broken answers", "partial_output_tokens"),
    Figure("came together", "tokens_together_share", "share"),
    Figure("cached", "cached_tokens"),
    Figure("prefix hit rate", "prefix_hit_rate", "share"),
)
LAG = (
    Figure("median", "replay_sched_lag_p50", "seconds"),
    Figure("p90", "replay_sched_lag_p90", "seconds"),
    Figure("p99", "replay_sched_lag_p99", "seconds"),
)
HOST = (Figure("steal time", "replay_steal_share", "share"),)
GROUPS = {
    "Requests": REQUESTS,
    "Throughput": THROUGHPUT,
    "Tokens": TOKENS,
    "Lag behind the schedule": LAG,
    "CPU time of the client's host": HOST,
}


def latencies(reports: list[dict[str, Any]]) -> list[Latency]:
    """Return the latencies of which any of the reports has a median."""
    return [one for one in LATENCIES if any(report.get(one.field("median")) is not None for report in reports)]


def comparable(reports: list[dict[str, Any]]) -> dict[str, list[Figure]]:
    """Return the figures that any of the reports has, by heading."""
    groups = {heading: list(figures) for heading, figures in GROUPS.items()}
    for one in latencies(reports):
        groups[one.label] = [
            Figure(statistic, one.field(statistic), "time") for statistic in STATISTICS if statistic != "max"
        ]
    kept = {
        heading: [f for f in rows if any(f.value(r) is not None for r in reports)] for heading, rows in groups.items()
    }
    return {heading: rows for heading, rows in kept.items() if rows}


def verdict(report: dict[str, Any]) -> str | None:
    """Return the reason why the report's run is not valid; None if it is."""
    if report.get("valid", True):
        return None
    return str(report.get("invalid_reason") or "the report does not say why")


def shortfalls(report: dict[str, Any]) -> list[str]:
    """Return what went wrong: `8 failed (6 refused, 2 late)`, `1 short answers`, `3 preemptions`."""

    def counted(*fields: str) -> list[str]:
        return [f"{numbers.number(report[field])} {field.replace('_', ' ')}" for field in fields if report.get(field)]

    failed = counted("failed")
    if ways := counted("errored", "refused", "late", "unfinished"):
        failed = [f"{' '.join(failed)} ({', '.join(ways)})"]
    return [*failed, *counted("short_answers", "preemptions")]


def goodput_terms(report: dict[str, Any]) -> list[str]:
    """Return each limit of the goodput with the share of requests that meet it: `TTFT ≤ 200 ms: 97 %`."""
    labels = {one.name: one.label for one in LATENCIES}
    shares = report.get("goodput_shares") or {}
    return [
        f"{labels.get(name, name)} ≤ {numbers.time(limit)}: {numbers.percent(shares.get(name))}"
        for name, limit in (report.get("goodput_limits") or {}).items()
    ]


def with_distinct_titles(reports: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the reports, equal titles extended by the differences of their configurations, or else numbered."""
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
    """Return the first values of the configuration that differ between the reports, such as `speed 2`."""
    configs = [other.get("config") or {} for other in alike]
    config = report.get("config") or {}
    differing = [key for key, value in config.items() if any(other.get(key) != value for other in configs)]
    return [f"{key.replace('_', ' ')} {config[key]}"[:40] for key in differing[:_MOST_TERMS]]
