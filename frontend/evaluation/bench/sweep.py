"""Sweep: runs at several rates, until the highest one that meets limits is found."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from quire.frontend.evaluation.bench.rate_search import RateSearch
from quire.frontend.evaluation.replay.load import Load
from quire.frontend.evaluation.replay.runner import Runs
from quire.frontend.evaluation.report import numbers
from quire.frontend.evaluation.report.figures import goodput_terms, verdict
from quire.frontend.evaluation.report.run import Run
from quire.frontend.evaluation.report.summary import summarize
from quire.frontend.evaluation.workload.request import WorkloadRequest


@dataclass(frozen=True)
class Try:
    """A run at a rate, in requests a second; a share `attainment` of its requests has to meet the limits."""

    rate: float
    attainment: float
    report: dict[str, Any]

    @property
    def share(self) -> float:
        """Share of requests that met all limits."""
        return float((self.report["goodput_shares"] or {}).get("all") or 0.0)

    @property
    def invalid(self) -> str | None:
        """Reason why the run is not valid; None if it is."""
        return verdict(self.report)

    @property
    def is_met(self) -> bool:
        """True for a valid run of which enough requests met the limits."""
        return self.invalid is None and self.share >= self.attainment

    @property
    def verdict(self) -> str:
        """Result of the try in a word."""
        if self.invalid is not None:
            return "not valid"
        return "met" if self.is_met else "missed"

    def line(self) -> str:
        """Return the result of the try in a line."""
        return (
            f"{self.rate:.4g} requests/s: {self.verdict}, {numbers.percent(self.share)} of "
            f"{self.report['num_prompts']} requests within the limits; TTFT {self._times('ttft')}, "
            f"TPOT {self._times('tpot')}" + (f"; {self.invalid}" if self.invalid is not None else "")
        )

    def _times(self, name: str) -> str:
        median, p99 = (numbers.time(self.report[f"{statistic}_{name}_ms"]) for statistic in ("median", "p99"))
        return f"{median}, p99 {p99}"


@dataclass(frozen=True)
class Rates:
    """The requests at a rate, their intended number, and the collector of a run."""

    requests: Callable[[float], Iterable[WorkloadRequest]]
    num: Callable[[float], int]  # number of requests at a rate; a trace may have fewer
    run: Callable[[float], Run]


class Sweep:
    """Runs at the rates of a search, each with the same load, an empty prefix cache and prompts of its own.

    `tries` are the runs so far; `interrupted` says what ended the sweep early. `report_line` gets a line for each try.
    """

    def __init__(
        self,
        runs: Runs,
        search: RateSearch,
        rates: Rates,
        load: Load,
        report_line: Callable[[str], None],
        seed: int = 0,
    ) -> None:
        self.tries: list[Try] = []
        self.search = search
        self.interrupted: str | None = None
        self._runs = runs
        self._rates = rates
        self._load = load
        self._report_line = report_line
        self._seed = seed

    async def run(self) -> str | None:
        """Try rates until the search ends, or return what interrupted a run. Raises what reading requests raises."""
        try:
            while self.interrupted is None and (rate := self.search.next_rate) is not None:
                await self._try(rate)
        except Exception as error:
            self.interrupted = str(error)
            raise
        return self.interrupted

    async def _try(self, rate: float) -> None:
        run = self._rates.run(rate)
        await self._runs.target.reset_cache()
        # Other prompts each time, since some servers have no way to empty their cache.
        seed = self._seed + len(self.tries)
        self.interrupted = await self._runs.replay(run, self._rates.requests(rate), self._load, seed=seed)
        found = Try(rate, self.search.attainment, summarize(run))
        self.tries.append(found)
        if self.interrupted is not None:
            self._report_line(found.line())
            return
        if run.requests < (wanted := self._rates.num(rate)):
            self._report_line(
                f"the trace has {run.requests} requests, and a run at {rate:.4g} requests/s needs {wanted}: in a "
                "shorter run no queue grows, and the result may be too high; give a longer trace"
            )
        self.search.record(None if found.invalid is not None else found.share)
        self._report_line(found.line() + ("; it is tried again" if self.search.next_rate == rate else ""))

    @property
    def best(self) -> Try | None:
        """The try at the highest rate that met the limits."""
        return next((each for each in reversed(self.tries) if each.is_met and each.rate == self.search.met), None)

    @property
    def conclusion(self) -> str:
        """Result of the sweep in a sentence."""
        search = self.search
        if search.met is None:
            return self._nothing()
        found = f"{search.met:.4g} requests/s meet the limits"
        if search.missed is not None:
            why = self._why(search.missed)
            return f"{found}, {search.missed:.4g} do not{why}" + (self._so_far() if search.next_rate else "")
        if search.next_rate is not None:
            return f"{found}{self._so_far()}"
        return f"{found}, and more may: no higher rate was tried; raise --high, or make longer runs"

    def report(self, title: str, config: dict[str, Any]) -> dict[str, Any]:
        """Return the report of the sweep, ready for JSON; `runs` are the reports of all tries, in their order."""
        reports = [each.report for each in self.tries]
        first = reports[0] if reports else {}
        return {
            "title": title,
            **{name: first.get(name) for name in ("date", "backend", "model_id", "goodput_limits")},
            "attainment": self.search.attainment,
            "precision": self.search.precision,
            "highest_rate": self.search.met,
            "lowest_missed_rate": self.search.missed,
            "conclusion": self.conclusion,
            "interrupted": self.interrupted,
            "config": config,
            "tries": [
                {"request_rate": each.rate, "met": each.is_met, "share": each.share, "valid": each.invalid is None}
                for each in self.tries
            ],
            "runs": reports,
        }

    def _nothing(self) -> str:
        if self.search.missed is None:
            return f"no rate has been tried to its end{self._so_far()}"
        last = self.tries[-1]
        if last.invalid is not None:
            return f"even {self.search.missed:.4g} requests/s make no valid run: {last.invalid}; lower --low"
        return (
            f"even {self.search.missed:.4g} requests/s miss the limits: {numbers.percent(last.share)} of the "
            f"requests meet them ({', '.join(goodput_terms(last.report))}), {numbers.percent(last.attainment)} is "
            "asked; lower --low, or raise the limits of --goodput"
        )

    def _why(self, rate: float) -> str:
        """Say so if a rate was missed because its run is not valid."""
        last = [each for each in self.tries if each.rate == rate][-1]
        return "" if last.invalid is None else ": not because of the limits, but because that run is not valid"

    def _so_far(self) -> str:
        return "; the sweep ended early" + (f": {self.interrupted}" if self.interrupted else "")
