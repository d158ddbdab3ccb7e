"""Reports as JSON files: Quire's, and those of `vllm bench serve --save-result`."""

from __future__ import annotations

import json
from array import array
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np

from quire.frontend.evaluation.replay.record import TOGETHER
from quire.frontend.evaluation.report.quantiles import (
    ExactDistribution,
    PooledDistribution,
    ValueDistribution,
    WithZeros,
)
from quire.frontend.evaluation.report.summary import curve, curve_shares, spread
from quire.frontend.whole_file import write_whole

_NEEDED = ("duration", "completed", "request_throughput")
_WHERE = (
    "--output of `quire replay` and `quire simulate` writes such files, and so does `vllm bench serve --save-result`"
)


class _Curve(msgspec.Struct):
    count: int
    ms: list[float]


class _GanttRow(msgspec.Struct):
    index: int
    outcome: str
    prompt_tokens: int
    output_tokens: int
    phases: list[tuple[str, float, float]]


class _Gantt(msgspec.Struct):
    every: Annotated[int, msgspec.Meta(ge=1)]
    rows: list[_GanttRow]


class _ErrorCount(msgspec.Struct):
    outcome: str
    error: str
    count: int


class _Engine(msgspec.Struct):
    engine: int
    requests: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int


class _Report(msgspec.Struct):
    """The parts of a report that are not mere numbers. Other tools' reports may lack all but the first three."""

    duration: Annotated[float, msgspec.Meta(ge=0, le=1e9)]
    completed: int
    request_throughput: float | None
    title: str = ""
    valid: bool = True
    invalid_reason: str | None = None
    error_counts: list[_ErrorCount] = []
    config: dict[str, Any] = {}
    curves: dict[str, _Curve | list[float]] = {}
    timeline: dict[str, list[float | None]] = {}
    client_timeline: dict[str, list[float]] = {}
    gantt: _Gantt | None = None
    goodput_limits: dict[str, float] | None = None
    goodput_shares: dict[str, float | None] | None = None
    engines: list[_Engine] = []


def save_json(report: dict[str, Any], path: Path) -> None:
    """Write the report atomically, with one field a line. Raises OSError."""
    lines = [f"  {_encode(name)}: {_encode(value)}" for name, value in report.items()]
    write_whole(path, "{\n" + ",\n".join(lines) + "\n}\n")


def load_json(path: Path) -> dict[str, Any]:
    """Read a report of Quire or a result of vLLM, whose curves are made from its details if it has those.

    Raises ValueError when there is no such file, or it is no report.
    """
    report = _read(path)
    missing = [name for name in _NEEDED if name not in report]
    if missing:
        raise ValueError(f"{path} is not the result of a benchmark: it has no {', '.join(missing)}; {_WHERE}")
    try:
        msgspec.convert(report, _Report)
    except msgspec.ValidationError as error:
        raise ValueError(f"{path} is not the result of a benchmark: {error}; {_WHERE}") from error
    for name, value in report.items():
        if name.endswith(("_ms", "_throughput")) and not isinstance(value, int | float | None):
            raise ValueError(f"{path} is not the result of a benchmark: {name} is {value!r}, not a number; {_WHERE}")
    if not report.get("title"):
        report["title"] = str(report.get("label") or path.stem)
    if "tokens_together_share" not in report:
        _name_gaps(report)
    if "curves" not in report:
        _add_details(report)
    return report


def _encode(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _read(path: Path) -> dict[str, Any]:
    try:
        report = json.loads(path.read_bytes())
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}; give the JSON file of a run") from error
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}; {_WHERE}") from error
    return report if isinstance(report, dict) else {}  # the empty report lacks every field


def _name_gaps(report: dict[str, Any]) -> None:
    """Name latencies between increments, which vLLM calls ITL, as reports do, where ITL is that of tokens."""
    for name in [name for name in report if name.endswith("_itl_ms")]:
        report[name.replace("_itl_ms", "_gap_ms")] = report.pop(name)
    curves = report.get("curves") or {}
    if "itl" in curves:
        curves["gap"] = curves.pop("itl")


def _add_details(report: dict[str, Any]) -> None:
    """Add the curves of a result that was saved with --save-detailed, and its ITL, of requests without an error."""
    report["curves"] = {}
    gaps = PooledDistribution()
    token_latencies = WithZeros(gaps)
    values: dict[str, ExactDistribution] = {name: ExactDistribution() for name in ("ttft", "tpot", "e2el")}
    columns = [report.get(name) for name in ("ttfts", "itls", "output_lens", "errors")]
    if not all(isinstance(column, list) for column in columns):
        return
    try:
        for ttft, itls, tokens, error in zip(*columns, strict=True):
            if error:
                continue
            decode = float(np.sum(itls))
            values["ttft"].add(ttft)
            values["e2el"].add(ttft + decode)
            apart = array("d", [gap for gap in itls if gap >= TOGETHER])
            gaps.extend(apart)
            token_latencies.zeros += max(0, tokens - 1 - len(apart))
            if tokens > 1:
                values["tpot"].add(decode / (tokens - 1))
    except (TypeError, ValueError):
        return  # details of another form; the other figures do without them
    distributions: dict[str, ValueDistribution] = {**values, "itl": token_latencies, "gap": gaps}
    shares = curve_shares()
    curves = {name: curve(each, shares) for name, each in distributions.items() if each.count}
    if curves:
        report["curves"] = {"shares": shares.tolist(), **curves}
        report |= {**spread("itl", token_latencies), "tokens_together_share": token_latencies.zeros_share}
