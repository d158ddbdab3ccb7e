"""Simulations in a process of their own, with failures on either side, and calibration files."""

from __future__ import annotations

import itertools
import json
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from calibrations import CALIBRATION, calibration_file
from simulations import BLOCK, FleetRun, chats, crowd, request, setup

from quire.frontend.evaluation.replay.record import Outcome
from quire.frontend.evaluation.report.goodput import GoodputLimits
from quire.frontend.evaluation.report.run import Run
from quire.frontend.evaluation.report.summary import summarize
from quire.frontend.evaluation.simulation.plan import Plan, find_engines, load_calibration
from quire.frontend.evaluation.simulation.process import SimulationError, simulate
from quire.frontend.evaluation.simulation.records import record_of, sample_of
from quire.frontend.evaluation.workload.request import WorkloadRequest
from quire.protocol.routing.routers import ROUTERS
from quire.protocol.simulation import (
    FetchTime,
    SimulatedRequest,
    SimulatedResult,
    SimulationEnd,
    SimulationOutput,
    SimulationSample,
)

Workload = Callable[[], Iterable[WorkloadRequest]]


def workload(count: int, **kinds: Any) -> list[WorkloadRequest]:
    """Return chats as requests of a trace."""
    return rows(chats(count, **kinds))


def rows(requests: Iterable[SimulatedRequest]) -> list[WorkloadRequest]:
    """Return requests as those of a trace."""
    return [
        WorkloadRequest(
            each.arrival,
            each.prompt_tokens,
            each.output_tokens,
            tuple(each.blocks),
            BLOCK,
            each.session,
            each.delay,
        )
        for each in requests
    ]


def plan(requests: Workload, **changes: Any) -> Plan:
    def collect(title: str, config: dict[str, Any]) -> Run:
        return Run(title, config, goodput=GoodputLimits.parse(["ttft:300", "tpot:40"]))

    return Plan(CALIBRATION, requests, collect, "chats", shape_changes=changes)


def test_the_process_has_the_results_of_the_fleet() -> None:
    """The results of the process, through frames and pipes, equal those of a fleet in this process."""
    expected = FleetRun(setup(3, "sticky"), chats(150, sessions=5))
    outputs = [one for batch in simulate(setup(3, "sticky"), workload(150, sessions=5)) for one in batch]
    results = sorted((one for one in outputs if isinstance(one, SimulatedResult)), key=lambda result: result.index)
    assert results == expected.results
    assert [one for one in outputs if isinstance(one, SimulationSample)] == expected.samples
    assert outputs[-1] == expected.end
    assert sum(isinstance(one, SimulationEnd) for one in outputs) == 1


def test_engines_fetch_prefixes_unless_they_are_told_not_to() -> None:
    made = plan(lambda: rows(crowd(60)))
    runs = [made.simulate(3, "prefix-affinity"), replace(made, fetches_prefixes=False).simulate(3, "prefix-affinity")]
    fetched = [sum(engine.fetched_tokens for engine in run.end.engines) for run in runs]
    assert fetched[0] > 0 == fetched[1]
    for run, fetch in zip(runs, (CALIBRATION.fetch, None), strict=True):
        assert run.end == FleetRun(setup(3, "prefix-affinity", fetch=fetch), crowd(60)).end
        assert run.run.config["fetch_seconds"] == (None if fetch is None else msgspec.to_builtins(fetch))
    ttft = [summarize(run.run)["mean_ttft_ms"] for run in runs]
    assert ttft[0] < ttft[1]


def test_an_unknown_router_is_an_error() -> None:
    with pytest.raises(SimulationError) as error:
        list(simulate(setup(1, "nobody"), []))
    assert str(error.value) == f"the router 'nobody' is not known; it can be {', '.join(ROUTERS)}"


def test_records_have_the_latency_of_requests() -> None:
    for result in FleetRun(setup(num_pages=80), chats(40, rate=200.0)).results:
        record = record_of(result)
        assert record.outcome is Outcome.COMPLETED
        assert record.output_tokens == record.wanted_output_tokens == len(record.gaps) + 1
        queued = record.phases[0].begin  # when the engine took it, at the end of a step
        assert record.sent <= queued
        assert record.ended - queued == pytest.approx(sum(phase.end - phase.begin for phase in record.phases))
        assert record.lag == 0
        assert [phase.kind for phase in record.phases][:2] == ["queued", "prefill"]


def test_tokens_of_one_step_came_together() -> None:
    result = FleetRun(setup(num_pages=80), chats(1)).results[0]
    times = array("d", [1.0, 1.5, 1.5, 1.5, 2.25])
    record = record_of(msgspec.structs.replace(result, token_times=times.tobytes()))
    assert record.gaps.tolist() == [0.5, 0.75]
    assert (record.output_tokens, record.num_together) == (5, 2)


def test_a_preempted_request_is_in_prefill_again_until_its_next_token() -> None:
    requests = [request(index, 0.01 * index, 40, 5 if index < 60 else 600, [index]) for index in range(75)]
    results = FleetRun(setup(num_pages=40, max_model_len=700), requests).results
    records = [record_of(result) for result in results]
    preempted = [record for record in records if record.num_preemptions]
    assert preempted
    for record in preempted:
        kinds = [phase.kind for phase in record.phases]
        assert kinds == ["queued", *["prefill", "decode", "preempted"] * record.num_preemptions, "prefill", "decode"]
        assert all(one.end == two.begin for one, two in itertools.pairwise(record.phases))
        assert record.phases[-1].end == record.ended


def test_refused_and_failed_requests_are_distinguished() -> None:
    requests = [WorkloadRequest(0.0, 640, 50, tuple(range(10 * n, 10 * n + 10)), BLOCK) for n in range(12)]
    requests.append(WorkloadRequest(30.0, 6400, 5, tuple(range(100)), BLOCK))
    simulated = plan(lambda: requests, max_waiting_requests=3, max_num_seqs=2).simulate(1, "round-robin")
    report = summarize(simulated.run)
    assert (report["completed"], report["refused"], report["errored"], report["failed"]) == (3, 9, 1, 10)
    assert report["simulated"]
    assert report["duration"] == simulated.end.seconds


def test_samples_keep_their_fields() -> None:
    sample = FleetRun(setup(), chats(10)).samples[0]
    for name, value in sample_of(sample)._asdict().items():
        assert value == getattr(sample, name)


def test_a_trace_that_breaks_in_the_middle_ends_the_simulation_with_its_error() -> None:
    def broken() -> Iterator[WorkloadRequest]:
        yield from workload(100)
        raise ValueError("trace.jsonl:101: what is this")

    told: SimulationOutput = []
    with pytest.raises(ValueError, match=r"trace\.jsonl:101"):
        told.extend(itertools.chain.from_iterable(simulate(setup(), broken())))
    assert sum(isinstance(one, SimulatedResult) for one in told) == 100


def test_a_closed_iterator_leaves_no_process() -> None:
    def endless() -> Iterator[WorkloadRequest]:
        time = 0.0
        while True:
            for each in workload(100, rate=5.0):
                yield WorkloadRequest(time + each.arrival, 640, 5, each.blocks + tuple(range(10)), BLOCK)
            time += each.arrival

    outputs = simulate(setup(sample_seconds=0.1), endless())
    assert next(outputs)
    outputs.close()  # kills it, and waits for it and for the thread that feeds it


def test_the_fewest_engines_are_found() -> None:
    requests = workload(120, rate=40.0)
    made = plan(lambda: requests)
    tried: dict[int, float] = {}

    def attempt(num_engines: int) -> Any:
        simulated = made.simulate(num_engines, "least-loaded")
        tried[num_engines] = simulated.attainment
        return simulated

    number, simulated = find_engines(attempt, 0.9, 64)
    assert tried[number] == simulated.attainment >= 0.9
    assert tried[number - 1] < 0.9
    assert len(simulated.end.engines) == number > 1


def test_limits_that_no_number_of_engines_meets_are_an_error() -> None:
    requests = workload(3)
    made = replace(
        plan(lambda: requests),
        collector=lambda title, config: Run(title, config, goodput=GoodputLimits.parse(["ttft:1"])),
    )
    with pytest.raises(ValueError, match=r"4 engines are not enough: 0.00% of the requests meet the limits"):
        find_engines(lambda number: made.simulate(number, "round-robin"), 0.9, 64)
    with pytest.raises(ValueError, match=r"2 engines are not enough"):
        find_engines(lambda number: made.simulate(number, "round-robin"), 0.9, 2)


def test_a_calibration_is_read(tmp_path: Path) -> None:
    assert load_calibration(calibration_file(tmp_path)) == CALIBRATION
    slow = load_calibration(calibration_file(tmp_path, fetch={"token": 0.5}))
    assert slow.fetch == FetchTime(token=0.5)


def test_a_calibration_from_before_fetches_were_simulated_is_read(tmp_path: Path) -> None:
    path = calibration_file(tmp_path)
    written = json.loads(path.read_text())
    del written["fetch"]
    path.write_text(json.dumps(written))
    assert load_calibration(path) == CALIBRATION


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"step": {"base": None}}, "missing required field `base`"),
        ({"step": {"decode": -1e-3}}, "Expected `float` >= 0.0 - at `$.step.decode`"),
        ({"step": {"base": "fast"}}, "Expected `float`, got `str` - at `$.step.base`"),
        ({"step": {"bass": 1.0}}, "unknown field `bass`"),
        ({"step": {"base": 0, "decode": 0}}, "a step of this engine takes no time"),
        ({"engine": {"num_pages": 0}}, "Expected `int` >= 1 - at `$.engine.num_pages`"),
        ({"fetch": {"token": -1}}, "Expected `float` >= 0.0 - at `$.fetch.token`"),
        ({"client": {"to_engine": -1}}, "Expected `float` >= 0.0 - at `$.client.to_engine`"),
        (
            {"client": {"rests": [{"seconds": -1, "later": 1}]}},
            "Expected `float` >= 0.0 - at `$.client.rests[0].seconds`",
        ),
        ({"client": {"rests": [{"seconds": 2, "later": 1}] * 2}}, "rests must be given in order, the shortest first"),
    ],
)
def test_a_wrong_field_is_named(tmp_path: Path, changes: dict[str, dict[str, Any]], expected: str) -> None:
    with pytest.raises(ValueError, match=r"calibration\.json") as error:
        load_calibration(calibration_file(tmp_path, **changes))
    assert expected in str(error.value)


def test_invalid_json_and_a_missing_file_are_named(tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text("{nonsense")
    with pytest.raises(ValueError, match=r"c\.json is not a calibration: JSON is malformed.*quire calibrate"):
        load_calibration(tmp_path / "c.json")
    with pytest.raises(ValueError, match=r"none\.json cannot be read: No such file"):
        load_calibration(tmp_path / "none.json")
