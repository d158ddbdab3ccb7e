"""Benchmarks of a real engine with the demo model."""

from __future__ import annotations

import asyncio
import html.parser
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.frontend.evaluation.bench.offline import Latencies, measure_latency
from quire.frontend.evaluation.bench.rate_search import RateSearch
from quire.frontend.evaluation.bench.sweep import Rates, Sweep
from quire.frontend.evaluation.bench.sweep_page import write_page
from quire.frontend.evaluation.replay.engine_target import EngineTarget
from quire.frontend.evaluation.replay.load import Load
from quire.frontend.evaluation.replay.runner import Runs
from quire.frontend.evaluation.report.files import save_json
from quire.frontend.evaluation.report.goodput import GoodputLimits
from quire.frontend.evaluation.report.run import Run
from quire.frontend.evaluation.workload.arrivals import arrive, at_rate
from quire.frontend.evaluation.workload.request import WorkloadRequest
from quire.frontend.evaluation.workload.synthetic import RandomWorkload

LENGTHS = RandomWorkload(input_len=8, output_len=3, prefix_len=64)
NUM = 5


@pytest.fixture(scope="module")
def target() -> Iterator[EngineTarget]:
    """A target with an engine of little memory."""
    target = EngineTarget.from_options(num_pages=64, max_num_seqs=8, seed=1)
    yield target
    asyncio.run(target.close())


def requests(rate: float) -> Iterator[WorkloadRequest]:
    return arrive(LENGTHS.requests(NUM, 2048), at_rate(rate))


def run(rate: float, capacity: float) -> Run:
    """Return a run with limits that only rates up to the capacity meet."""
    limits = GoodputLimits(ttft=1e6, tpot=1e6) if rate <= capacity else GoodputLimits(ttft=1e-3, tpot=1e6)
    return Run(f"{rate:g}", {"request_rate": rate}, goodput=limits)


def sweep_of(target: EngineTarget, capacity: float, search: RateSearch, told: list[str], runs: Runs) -> Sweep:
    assert runs.target is target
    return Sweep(
        runs, search, Rates(requests, lambda _: NUM, lambda rate: run(rate, capacity)), Load(warm_up=1), told.append
    )


def test_latencies_are_of_the_batches_after_the_warm_up(target: EngineTarget) -> None:
    found = Latencies()
    made = [*LENGTHS.requests(4 * 3, 2048)]
    asyncio.run(measure_latency(Runs(target), made, 3, 1, found))
    report = found.report()
    assert len(report["latencies"]) == 3
    assert all(seconds > 0 for seconds in report["latencies"])
    assert report["avg_latency"] == pytest.approx(sum(report["latencies"]) / 3)
    assert list(report["percentiles"]) == ["10", "25", "50", "75", "90", "99"]
    assert report["percentiles"]["50"] == sorted(report["latencies"])[1]


def test_a_batch_that_does_not_complete_has_no_latency(target: EngineTarget) -> None:
    found = Latencies()
    made = [*RandomWorkload(3000, 3).requests(2, None)]
    with pytest.raises(RuntimeError, match="3000"):
        asyncio.run(measure_latency(Runs(target), made, 2, 0, found))
    assert "a request of the batch is errored" in str(found.interrupted)
    with pytest.raises(ValueError, match="no batch"):
        found.report()


def test_batches_end_when_they_are_stopped(target: EngineTarget) -> None:
    async def main() -> Latencies:
        found, runs = Latencies(), Runs(target)
        runs.stop("enough")
        await measure_latency(runs, [*LENGTHS.requests(4, 2048)], 2, 0, found)
        return found

    found = asyncio.run(main())
    assert (found.seconds, found.interrupted) == ([], "enough")


def test_a_sweep_finds_the_rate_and_its_page_shows_it(target: EngineTarget, tmp_path: Path) -> None:
    told: list[str] = []
    sweep = sweep_of(target, 300.0, RateSearch(100.0, precision=0.5), told, Runs(target))
    asyncio.run(sweep.run())
    assert [each.rate for each in sweep.tries] == [100.0, 200.0, 400.0, 300.0, 400.0]
    assert [line.split()[2].rstrip(",") for line in told] == ["met", "met", "missed", "met", "missed"]
    assert sweep.conclusion == "300 requests/s meet the limits, 400 do not"
    # The prefix is computed once in each run: none finds that of an earlier one.
    assert [each.report["cached_tokens"] for each in sweep.tries] == [64 * (NUM - 1)] * 5
    assert [each.report["warm_up"] for each in sweep.tries] == [1] * 5
    report = sweep.report("a <sweep>", {"seed": 0})
    save_json(report, tmp_path / "sweep.json")
    saved = json.loads((tmp_path / "sweep.json").read_text())
    assert (saved["highest_rate"], saved["lowest_missed_rate"], len(saved["runs"])) == (300.0, 400.0, 5)
    write_page(report, tmp_path / "sweep.html")
    page = (tmp_path / "sweep.html").read_text()
    html.parser.HTMLParser().feed(page)
    assert "a &lt;sweep&gt;" in page
    assert page.count("<circle") >= 5 * 5  # of goodput, and two of each latency


def test_limits_that_no_rate_meets_are_reported(target: EngineTarget, tmp_path: Path) -> None:
    sweep = sweep_of(target, 1.0, RateSearch(100.0), [], Runs(target))
    asyncio.run(sweep.run())
    assert sweep.best is None
    assert "even 100 requests/s miss the limits: 0 % of the requests meet them (TTFT ≤ 0.001 ms" in sweep.conclusion
    write_page(sweep.report("nothing", {}), tmp_path / "sweep.html")
    assert "even 100 requests/s" in (tmp_path / "sweep.html").read_text()


def test_a_stopped_sweep_keeps_the_results_so_far(target: EngineTarget, tmp_path: Path) -> None:
    runs = Runs(target)
    told: list[str] = []
    sweep = sweep_of(target, 1e9, RateSearch(100.0), told, runs)

    async def main() -> None:
        running = asyncio.create_task(sweep.run())
        while not told:  # noqa: ASYNC110 - the turn after the first try
            await asyncio.sleep(0)
        runs.stop("enough")
        await running

    asyncio.run(main())
    assert sweep.interrupted == "enough"
    assert "the run was interrupted: enough" in told[-1]
    assert "tried again" not in told[-1]
    assert [each.is_met for each in sweep.tries] == [True, False]
    assert sweep.conclusion == "100 requests/s meet the limits; the sweep ended early: enough"
    report = sweep.report("stopped", {})
    assert report["runs"][1]["unfinished"] > 0
    write_page(report, tmp_path / "sweep.html")


def test_a_trace_too_short_for_a_rate_is_reported(target: EngineTarget) -> None:
    told: list[str] = []
    rates = Rates(requests, lambda rate: 2 * NUM if rate > 100 else NUM, lambda rate: run(rate, capacity=1.0))
    asyncio.run(Sweep(Runs(target), RateSearch(100.0, 200.0), rates, Load(), told.append).run())
    assert not any("the trace has" in line for line in told)
    rates = Rates(requests, lambda _: 2 * NUM, lambda rate: run(rate, capacity=1.0))
    asyncio.run(Sweep(Runs(target), RateSearch(100.0, 200.0), rates, Load(), told.append).run())
    assert f"the trace has {NUM} requests, and a run at 100 requests/s needs {2 * NUM}" in "".join(told)


def test_a_run_of_late_requests_is_not_met(target: EngineTarget) -> None:
    late = Rates(
        lambda rate: arrive(LENGTHS.requests(3, 2048), [-1.0] * 3), lambda _: 3, lambda rate: run(rate, capacity=1e9)
    )
    sweep = Sweep(Runs(target), RateSearch(1000.0), late, Load(), lambda line: None)
    asyncio.run(sweep.run())
    assert [each.verdict for each in sweep.tries] == ["not valid"] * 2
    assert "make no valid run: requests were sent too late" in sweep.conclusion
