"""Reports on the terminal."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console
from synthetic_runs import synthetic_run

from quire.frontend.evaluation.report import numbers
from quire.frontend.evaluation.report.run import Run
from quire.frontend.evaluation.report.summary import summarize
from quire.frontend.evaluation.report.table import print_comparison, print_report


def printed(*reports: dict[str, Any], width: int = 80) -> list[str]:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    if len(reports) == 1:
        print_report(reports[0], console)
    else:
        print_comparison(list(reports), console)
    assert isinstance(console.file, io.StringIO)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def row(lines: list[str], name: str) -> list[str]:
    return next(line for line in lines if line.strip().startswith(name)).split()


def test_a_report_fits_a_narrow_terminal_and_cuts_no_number() -> None:
    report = summarize(synthetic_run())
    lines = printed(report)
    assert max(map(len, lines)) <= 80
    assert "…" not in "".join(lines)
    times = " ".join(numbers.time(report[f"{key}_ttft_ms"]) for key in ("mean", "median", "p90", "p99", "p99.9", "max"))
    assert " ".join(row(lines, "TTFT")) == f"TTFT {times}"
    text = " ".join(" ".join(lines).split())
    assert "192 of 200 completed, 8 failed (2 errored, 2 refused, 2 late, 2 unfinished)" in text
    assert "TTFT ≤ 300 ms: 91 %" in text
    assert "from each token to the next; 0 for the 0 % that came together with the one before." in text


def test_the_first_line_says_that_a_run_is_not_valid() -> None:
    run = Run("a run", {})
    run.end(0.0, "the engine died")
    lines = printed(summarize(run))
    assert lines[0] == "INVALID: the run was interrupted: the engine died; no request completed"
    assert "0 of 0 completed" in " ".join(lines)


def test_names_and_errors_are_no_markup() -> None:
    run = synthetic_run("[red]name[/red] [bold", requests=50)
    lines = printed(summarize(run))
    assert lines[0] == "[red]name[/red] [bold"


def test_runs_are_printed_side_by_side_with_their_ratios() -> None:
    first, second = summarize(synthetic_run("base")), summarize(synthetic_run("slower", slowness=2.0))
    lines = printed(first, second)
    assert row(lines, "base")[:2] == ["base", "slower"]
    at = next(number for number, line in enumerate(lines) if line == "TPOT")
    ratio = second["mean_tpot_ms"] / first["mean_tpot_ms"]
    assert lines[at + 1].split()[-1] == f"{ratio:.2f}x"


def test_a_figure_of_one_run_alone_has_no_ratio() -> None:
    report = summarize(synthetic_run("base"))
    other = {"title": "vllm", "duration": 2.0, "completed": 5, "request_throughput": 2.5, "median_ttft_ms": 70.0}
    lines = printed(other, report)
    assert row(lines, "goodput")[1:] == ["–", *numbers.number(report["request_goodput"]).split(), "/s"]  # noqa: RUF001


def test_numbers_read_well() -> None:
    assert [numbers.number(n) for n in (0, 0.0123, 1.234, 9.999, 12.34, 99.96, 1234.5)] == [
        "0", "0.0123", "1.23", "10.0", "12.3", "100", "1,234"
    ]  # fmt: skip
    times = [numbers.time(ms) for ms in (0.43, 212, 999.9, 1430, 59_990, 150_000, 7_200_000)]
    assert times == ["0.43 ms", "212 ms", "1.00 s", "1.43 s", "1.00 min", "2.50 min", "2 h"]
    assert numbers.number(None) == numbers.time(float("nan")) == "–"  # noqa: RUF001
