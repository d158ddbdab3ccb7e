"""Flags of commands that report on a run, and the output of the report."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quire.frontend.cli.flags import option, switch, wrong_usage
from quire.frontend.cli.output import say
from quire.frontend.whole_file import can_write_whole

if TYPE_CHECKING:
    from quire.frontend.evaluation.report.run import Run

Report = dict[str, Any]

_report = functools.partial(option, "Report")


@dataclass(frozen=True)
class ReportFlags:
    """Flags for the report; None means not given."""

    output: Annotated[Path | None, _report("Write it as JSON, with the names of `vllm bench serve`.", "FILE")] = None
    html: Annotated[Path | None, _report("Write it as one HTML page with figures.", "FILE")] = None
    goodput: Annotated[
        list[str] | None,
        _report("Count requests that meet these limits in milliseconds: ttft:200 tpot:50 e2el:5000.", "LIMIT..."),
    ] = None
    save_detailed: Annotated[
        bool, switch("Report", "--save-detailed", "Include the times of each request in the JSON.")
    ] = False
    compare: Annotated[
        list[Path] | None, _report("Compare with JSON reports; without TRACE, only show these.", "FILE...")
    ] = None

    def check(self, num_new: int = 1) -> None:
        """Check the flags before anything is measured. Raises `OSError` for files, `BadParameter` for other flags.

        `num_new` is the number of runs that will be shown in addition to those of --compare.
        """
        from quire.frontend.evaluation.report.goodput import GoodputLimits

        if self.goodput is not None:
            with wrong_usage():
                GoodputLimits.parse(self.goodput)
        if self.save_detailed and self.output is None:
            raise typer.BadParameter("--save-detailed applies to the JSON; give --output FILE as well")
        check_writable("--output", self.output)
        check_writable("--html", self.html)
        self._check_number(len(self.others) + num_new)

    @functools.cached_property
    def others(self) -> list[Report]:
        """The reports to compare with, loaded on first access. Raises `ValueError` for an invalid report."""
        if not self.compare:
            return []
        from quire.frontend.evaluation.report.files import load_json

        return [load_json(path) for path in self.compare]

    def _check_number(self, num_shown: int) -> None:
        if self.html is None or not self.compare:
            return
        from quire.frontend.evaluation.report.html import MOST_RUNS

        if num_shown > MOST_RUNS:
            raise typer.BadParameter(
                f"--html shows at most {MOST_RUNS} runs, and with --compare there are {num_shown}; "
                "compare with fewer, or omit --html"
            )

    def run(self, title: str, config: dict[str, Any]) -> Run:
        """Create the run that collects the measurements for the report."""
        from quire.frontend.evaluation.report.goodput import GoodputLimits
        from quire.frontend.evaluation.report.run import Run

        goodput = None if self.goodput is None else GoodputLimits.parse(self.goodput)
        config = {name: value for name, value in config.items() if value is not None}
        return Run(title, config, goodput=goodput, detailed=self.save_detailed)


def check_writable(name: str, path: Path | None) -> None:
    """Raise `OSError` if the file of a flag cannot be written; None means no file."""
    if path is not None and not can_write_whole(path):
        raise OSError(f"{name} {path}: the file cannot be written; name another")


def report_on(run: Run, flags: ReportFlags, more: Callable[[Report], Report] | None = None) -> None:
    """Save and print the report of a run that has ended, with the additional fields that `more` derives from it."""
    from quire.frontend.evaluation.report.files import save_json
    from quire.frontend.evaluation.report.summary import summarize

    report = summarize(run)
    if more is not None:
        report |= more(report)
    if flags.output is not None:  # first, so that no later error loses it
        save_json(report, flags.output)
    _show([*flags.others, report], flags)


def compare(flags: ReportFlags) -> None:
    """Print saved reports, and write their page."""
    if flags.output is not None:
        raise typer.BadParameter("--output saves a new run; give a TRACE, or omit it")
    if flags.goodput is not None:
        raise typer.BadParameter("--goodput applies to a new run; give a TRACE, or omit it")
    _show(flags.others, flags)


def _show(reports: list[dict[str, Any]], flags: ReportFlags) -> None:
    from rich.console import Console

    from quire.frontend.evaluation.report.table import print_comparison, print_report

    console = Console()
    print_report(reports[-1], console)
    if len(reports) > 1:
        print_comparison(reports, console)
    if flags.html is not None:
        from quire.frontend.evaluation.report.html import write_html

        write_html(reports, flags.html)
    written = [str(path) for path in (flags.output, flags.html) if path is not None]
    if written:
        say(f"written: {', '.join(written)}")
