"""`quire simulate`."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quire.frontend.cli.flags import Flags, option, rows_of, switch, takes_flags
from quire.frontend.cli.output import say
from quire.frontend.cli.report import ReportFlags, report_on
from quire.frontend.cli.workload import TraceFlags, note_skipped, open_trace, print_skipped, report_skipped, workload_of
from quire.protocol.engine_options import EngineOptions
from quire.protocol.speculative_config import SpeculativeConfig, parse_speculative_config

if TYPE_CHECKING:
    from quire.frontend.evaluation.report.run import Run
    from quire.frontend.evaluation.simulation.plan import Plan, SimulatedRun
    from quire.frontend.evaluation.workload.reading import Trace

_ATTAINMENT = 0.99
_MOST_ENGINES = 1024

_fleet = functools.partial(option, "Fleet")


@dataclass(frozen=True)
class FleetFlags:
    """Flags for the engines and their router; None means not given."""

    engines: Annotated[int | None, _fleet("Number of identical engines. Default: 1.", "N", min=1)] = None
    router: Annotated[
        str,
        _fleet(
            "round-robin, least-loaded, power-of-two, sticky, prefix-affinity; or all, to compare them, in which case "
            "--output r.json writes r-NAME.json for each. Default: prefix-affinity.",
            "NAME",
        ),
    ] = "prefix-affinity"
    find: Annotated[str | None, _fleet("engines: find the fewest that meet the limits of --goodput.", "WHAT")] = None
    attainment: Annotated[
        float | None, _fleet("For --find: share of requests that must meet them. Default: 0.99.", "SHARE", min=0, max=1)
    ] = None
    max_engines: Annotated[int | None, _fleet("For --find: maximum number to try. Default: 1024.", "N", min=1)] = None
    figure: Annotated[Path | None, _fleet("For --router all: draw the comparison, as .png or .svg.", "FILE")] = None
    concurrency: Annotated[
        int | None, _fleet("Closed loop: N users, each of which sends when it has its answer.", "N", min=1)
    ] = None
    speculative_config: Annotated[
        str | None,
        _fleet(
            "Engines draft tokens: a JSON object as for `quire serve`, with synthetic_acceptance_length, the tokens "
            "that a step with all drafts gives on average.",
            "JSON",
        ),
    ] = None
    fetch_prefixes: Annotated[
        bool,
        typer.Option(
            "--fetch-prefixes/--no-fetch-prefixes",
            help="Let engines of prefix-affinity fetch the beginning of a prompt from one another where that takes "
            "less time than computing it, as real ones do. Default: yes.",
            show_default=False,
            rich_help_panel="Fleet",
        ),
    ] = True
    hide_lengths: Annotated[
        bool, switch("Fleet", "--hide-lengths", "Hide answer lengths from engines: max_tokens is the context.")
    ] = False

    def check(self, report: ReportFlags) -> None:
        """Check the combination of flags. Raises `BadParameter`."""
        from quire.protocol.routing.routers import ROUTERS

        if self.router not in (*ROUTERS, "all"):
            raise typer.BadParameter(f"--router {self.router} is not known; it can be {', '.join(ROUTERS)}, or all")
        self.drafting()
        if self.figure is not None and self.router != "all":
            raise typer.BadParameter("--figure draws a comparison; give --router all")
        if report.compare and self.router == "all":
            raise typer.BadParameter("--compare takes one new run, --router all makes several; name one --router")
        if self.find is None:
            self._check_no_search()
        else:
            self._check_search(report)

    def drafting(self) -> SpeculativeConfig | None:
        """Return how engines draft tokens. Raises `BadParameter`."""
        if self.speculative_config is None:
            return None
        try:
            config = parse_speculative_config(self.speculative_config)
        except ValueError as error:
            raise typer.BadParameter(f"--speculative-config: {error}") from None
        if config.synthetic_acceptance_length is None:
            raise typer.BadParameter(
                "--speculative-config lacks synthetic_acceptance_length, which depends on the texts; measure it "
                "(1 + accepted / drafts of /metrics), and give it"
            )
        return config

    def _check_no_search(self) -> None:
        given = {"--attainment": self.attainment, "--max-engines": self.max_engines}
        if names := [name for name, value in given.items() if value is not None]:
            raise typer.BadParameter(f"{names[0]} applies to a search for engines; give --find engines, or omit it")

    def _check_search(self, report: ReportFlags) -> None:
        if self.find != "engines":
            raise typer.BadParameter(f"--find {self.find} is not known; it can be engines")
        if self.router == "all":
            raise typer.BadParameter("--find searches for the engines of one router; name that --router")
        if self.engines is not None:
            raise typer.BadParameter("--find searches for the number of engines; omit --engines")
        if not report.goodput:
            raise typer.BadParameter("--find needs the limits to meet; give --goodput ttft:MS tpot:MS")


class ShapeFlags(Flags):
    """Flags that change the calibrated engine."""

    rows = rows_of(
        EngineOptions,
        (
            "max_model_len", "max_num_seqs", "max_num_batched_tokens", "num_pages", "scheduling_policy",
            "enable_prefix_caching", "target_itl", "long_prefill_token_threshold", "max_waiting_requests",
            "max_waiting_tokens", "max_waiting_requests_per_client",
        ),
        section="Engines",
        unset="as calibrated",
    )  # fmt: skip


@takes_flags
def simulate(
    trace_path: Annotated[
        Path, typer.Option("--trace", metavar="FILE", help="As for `quire replay`.", show_default=False)
    ],
    calibration: Annotated[
        Path,
        typer.Option(metavar="FILE", help="Speed of an engine, as written by `quire calibrate`.", show_default=False),
    ],
    *,
    fleet: FleetFlags,
    shape: ShapeFlags,
    trace: TraceFlags,
    report: ReportFlags,
) -> None:
    """Simulate engines that serve a trace, with the report of `quire replay`.

    Scheduler, cache and request code are the real ones, under a virtual clock; only times are modeled, of steps and of
    what is on its way, with the parameters that `quire calibrate` fits to a host. The same seed gives the same results.
    """
    from quire.frontend.evaluation.simulation.plan import Plan, load_calibration

    report.check()
    fleet.check(report)
    shape.check()
    if trace.vocab_size is not None:
        raise typer.BadParameter("--vocab-size applies to prompts, and a simulation sends none; omit it")
    if fleet.concurrency is not None:
        trace.check_closed_loop()
    loaded, rows = load_calibration(calibration), open_trace(trace_path, trace)
    for doubt in loaded.doubts:
        say(f"{calibration} is not to be trusted: {doubt}")
    if rows.is_stream and (fleet.find or fleet.router == "all"):
        raise typer.BadParameter(
            f"--find and --router all read the trace several times, and {trace_path} is a pipe; write it to a file"
        )
    length = shape.max_model_len or loaded.engine.max_model_len
    plan = Plan(
        loaded,
        lambda: workload_of(rows, trace, length),
        lambda title, config: report.run(title, {**config, "trace": str(trace_path), **trace.given}),
        trace_path.name,
        trace.seed,
        not fleet.hide_lengths,
        fleet.concurrency,
        shape.given,
        fleet.drafting(),
        fetches_prefixes=fleet.fetch_prefixes,
    )
    if fleet.router == "all":
        _compare(plan, fleet, report, rows)
    elif fleet.find:
        _report(_find(plan, fleet).run, rows, report)
    else:
        run = plan.run(fleet.engines or 1, fleet.router)
        try:
            plan.simulate(fleet.engines or 1, fleet.router, run)
        finally:
            if run.requests:
                _report(run, rows, report)


def _report(run: Run, rows: Trace, report: ReportFlags) -> None:
    report_skipped(rows, run.config)
    report_on(run, report)


def _find(plan: Plan, fleet: FleetFlags) -> SimulatedRun:
    from quire.frontend.evaluation.simulation.plan import find_engines

    attainment = _ATTAINMENT if fleet.attainment is None else fleet.attainment

    def attempt(num_engines: int) -> SimulatedRun:
        simulated = plan.simulate(num_engines, fleet.router)
        share = simulated.attainment
        verdict = "enough" if share >= attainment else "too few"
        say(f"{num_engines} engines: {share:.2%} of {simulated.run.requests} requests meet the limits, {verdict}")
        return simulated

    number, simulated = find_engines(attempt, attainment, fleet.max_engines or _MOST_ENGINES)
    say(f"the fewest engines that meet the limits: {number}")
    return simulated


def _compare(plan: Plan, fleet: FleetFlags, report: ReportFlags, rows: Trace) -> None:
    from rich.console import Console

    from quire.frontend.evaluation.report.files import save_json
    from quire.frontend.evaluation.report.summary import summarize
    from quire.frontend.evaluation.simulation.comparison import draw_routers, router_table
    from quire.protocol.routing.routers import ROUTERS

    reports, imbalances, written = {}, {}, []
    for router in ROUTERS:
        simulated = plan.simulate(fleet.engines or 1, router)
        note_skipped(rows, simulated.run.config)
        reports[router], imbalances[router] = summarize(simulated.run), simulated.imbalance
        if report.output is not None:
            path = report.output.with_stem(f"{report.output.stem}-{router}")
            save_json(reports[router], path)
            written.append(path)
    print_skipped(rows)
    Console().print(router_table(reports, imbalances))
    if fleet.figure is not None:
        draw_routers(reports, fleet.figure)
        written.append(fleet.figure)
    if report.html is not None:
        from quire.frontend.evaluation.report.html import write_html

        write_html(list(reports.values()), report.html)
        written.append(report.html)
    if written:
        say(f"written: {', '.join(map(str, written))}")
