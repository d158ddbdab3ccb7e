"""Tables of reports on the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from quire.frontend.evaluation.replay.interference import explain_steal
from quire.frontend.evaluation.report import numbers
from quire.frontend.evaluation.report.figures import (
    STATISTICS,
    comparable,
    goodput_terms,
    latencies,
    shortfalls,
    verdict,
    with_distinct_titles,
)

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_NAME_WIDTH = 28  # of a run's name above its column


def print_report(report: dict[str, Any], console: Console) -> None:
    """Print the figures of a run, 80 columns wide; the first line says if and why it is not valid."""
    from rich.text import Text

    reason = verdict(report)
    if reason is not None:
        console.print(Text(f"INVALID: {reason}", style="bold red"))
    console.print(Text(str(report["title"]) + (" (simulated)" if report.get("simulated") else ""), style="bold"))
    console.print()
    if latencies([report]):
        console.print(_latency_table(report))
        console.print()
    console.print(_facts(report))
    for row in report.get("error_counts") or []:
        console.print(Text(f"{row['count']} {row['outcome']}: {row['error']}", style="red"))


def print_comparison(reports: list[dict[str, Any]], console: Console) -> None:
    """Print runs side by side, with ratios to the first one."""
    from rich.text import Text

    reports = with_distinct_titles(reports)
    for report in reports:
        reason = verdict(report)
        if reason is not None:
            console.print(Text(f"INVALID: {report['title']}: {reason}", style="bold red"))
    table = _plain_table()
    table.add_column("", no_wrap=True)
    for number, report in enumerate(reports):
        table.add_column(Text(_shortened(str(report["title"]))), justify="right", overflow="fold")
        if number:
            table.add_column("ratio", justify="right", no_wrap=True)
    for heading, figures in comparable(reports).items():
        table.add_row(Text(heading, style="bold"))
        for figure in figures:
            cells = [figure.text(reports[0])]
            for report in reports[1:]:
                cells += [figure.text(report), numbers.ratio(figure.value(report), figure.value(reports[0]))]
            table.add_row(f"  {figure.label}", *cells)
    console.print(table)


def _plain_table() -> Table:
    from rich.table import Table

    return Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")


def _shortened(name: str) -> str:
    return name if len(name) <= _NAME_WIDTH else name[: _NAME_WIDTH - 1] + "…"


def _latency_table(report: dict[str, Any]) -> Table:
    table = _plain_table()
    table.add_column("", no_wrap=True)
    for heading in STATISTICS:
        table.add_column(heading, justify="right", no_wrap=True)
    for one in latencies([report]):
        table.add_row(one.label, *(numbers.time(report.get(one.field(key))) for key in STATISTICS))
    return table


def _facts(report: dict[str, Any]) -> Table:
    """Return a line for each kind of figure that the report has."""
    from rich.text import Text

    table = _plain_table()
    table.show_header = False
    for name, text in {
        "requests": _requests(report),
        "throughput": _throughput(report),
        "goodput": _goodput(report),
        "tokens": _tokens(report),
        "ITL": _together(report),
        "lag": _lag(report),
        "target": _target(report),
        "steal": explain_steal(report.get("replay_steal_share")),
    }.items():
        if text:
            table.add_row(Text(name, style="dim"), Text(text))
    return table


def _requests(report: dict[str, Any]) -> str:
    completed = f"{numbers.number(report['completed'])} of {numbers.number(report.get('num_prompts'))} completed"
    return ", ".join([completed, *shortfalls(report), f"in {numbers.time(1000 * report['duration'])}"])


def _throughput(report: dict[str, Any]) -> str:
    number = numbers.number
    if report.get("request_throughput") is None:
        return ""
    return (
        f"{number(report.get('request_throughput'))} requests/s, {number(report.get('output_throughput'))} output "
        f"tok/s (best second {number(report.get('max_output_tokens_per_s'))}), "
        f"{number(report.get('total_token_throughput'))} tok/s with prompts; "
        f"{number(report.get('max_concurrent_requests'))} requests in flight at most"
    )


def _goodput(report: dict[str, Any]) -> str:
    if report.get("request_goodput") is None:
        return ""
    together = numbers.percent((report.get("goodput_shares") or {}).get("all"))
    terms = "".join(f"; {term}" for term in goodput_terms(report))
    return f"{numbers.number(report['request_goodput'])} requests/s, {together} of all{terms}"


def _tokens(report: dict[str, Any]) -> str:
    text = (
        f"{numbers.number(report.get('total_input_tokens'))} of prompts, "
        f"{numbers.number(report.get('total_output_tokens'))} of answers"
    )
    if report.get("prefix_hit_rate") is None:
        return text
    return f"{text}; {numbers.percent(report['prefix_hit_rate'])} of the prompts' from the prefix cache"


def _together(report: dict[str, Any]) -> str:
    share = report.get("tokens_together_share")
    if share is None:
        return ""
    return (
        f"from each token to the next; 0 for the {numbers.percent(share)} that came together with the one before. Gap: "
        "from each increment to the next, vLLM's ITL"
    )


def _target(report: dict[str, Any]) -> str:
    config = report.get("config") or {}
    flags = [f"{name}={value}" for name, value in (config.get("engine_flags") or {}).items()]
    host = config.get("client_host")
    return "; ".join(filter(None, [config.get("build"), ", ".join(flags), f"client on {host}" if host else None]))


def _lag(report: dict[str, Any]) -> str:
    lags = {name: report.get(f"replay_sched_lag_{name}") for name in ("p50", "p90", "p99")}
    if lags["p99"] is None or report.get("simulated"):
        return ""
    return ", ".join(f"{name} {numbers.time(1000 * lag)}" for name, lag in lags.items() if lag is not None)
