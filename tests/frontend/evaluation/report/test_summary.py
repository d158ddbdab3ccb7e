"""Figures of a run against numpy, on known records."""

from __future__ import annotations

import json
from array import array
from typing import Any

import numpy as np
import pytest
from synthetic_runs import synthetic_record, synthetic_run

from quire.frontend.evaluation.replay.record import Outcome, RequestRecord, TargetSample
from quire.frontend.evaluation.report.goodput import GoodputLimits
from quire.frontend.evaluation.report.quantiles import RELATIVE_ERROR
from quire.frontend.evaluation.report.run import Run
from quire.frontend.evaluation.report.summary import PERCENTILES, summarize

SECONDS = 60.0


def some_records(count: int = 150, seed: int = 7) -> list[RequestRecord]:
    random = np.random.default_rng(seed)
    records = [synthetic_record(index, random) for index in range(count)]
    for record in records[::9]:
        record.outcome, record.error = Outcome.ERRORED, "connection reset"
    return records


def report_of(records: list[RequestRecord], **options: Any) -> dict[str, Any]:
    run = Run("a run", {}, **options)
    for record in records:
        run.add(record)
    run.end(SECONDS)
    return summarize(run)


def completed(records: list[RequestRecord]) -> list[RequestRecord]:
    return [record for record in records if record.outcome is Outcome.COMPLETED]


def phase_times(record: RequestRecord, kind: str) -> list[float]:
    return [time for phase in record.phases if phase.kind == kind for time in phase[1:]]


def test_latencies_are_numpys_of_the_requests_that_completed() -> None:
    records = some_records()
    done = completed(records)
    report = report_of(records)
    expected = {
        "ttft": [r.first_token - r.sent for r in done if r.first_token],
        "tpot": [sum(r.gaps) / (r.output_tokens - 1) for r in done if r.output_tokens > 1],
        "e2el": [r.last_token - r.sent for r in done if r.last_token],
        "queue": [r.phases[0].end - r.phases[0].begin for r in done],
        "prefill": [
            (min(phase_times(r, "decode"), default=max(phase_times(r, "prefill")))) - r.phases[0].end for r in done
        ],
        "decode": [sum(r.gaps) for r in done],
    }
    for name, values in expected.items():
        for percentile in PERCENTILES:
            assert report[f"p{percentile:g}_{name}_ms"] == pytest.approx(1000 * np.percentile(values, percentile))
        assert report[f"mean_{name}_ms"] == pytest.approx(1000 * np.mean(values))
        assert report[f"std_{name}_ms"] == pytest.approx(1000 * np.std(values))
        assert report[f"median_{name}_ms"] == report[f"p50_{name}_ms"]
    gaps = np.concatenate([np.array(r.gaps) for r in done])
    assert report["mean_itl_ms"] == pytest.approx(1000 * gaps.mean())
    assert report["max_itl_ms"] == 1000 * gaps.max()
    for percentile in PERCENTILES:
        true = 1000 * np.percentile(gaps, percentile)
        assert report[f"p{percentile:g}_itl_ms"] == pytest.approx(true, rel=RELATIVE_ERROR)


def test_tokens_that_came_together_have_a_latency_of_zero_however_they_were_framed() -> None:
    """Three answers with tokens at the same times: one a token, all in increments, and half of each."""
    times = [1.0, 1.0, 1.0, 1.5, 1.5, 2.5]

    def answer(index: int, gaps: list[float]) -> RequestRecord:
        return RequestRecord(
            index=index, arrival=0.5, sent=0.5, prompt_tokens=3, wanted_output_tokens=6, outcome=Outcome.COMPLETED,
            first_token=1.0, last_token=2.5, ended=2.5, output_tokens=6, gaps=array("d", gaps),
        )  # fmt: skip

    framings = [np.diff(times).tolist(), [0.5, 1.0], [0.0, 0.5, 1.0]]
    latencies = np.diff(times)
    for gaps in framings:
        report = report_of([answer(0, gaps)])
        assert report["mean_itl_ms"] == pytest.approx(1000 * latencies.mean()) == report["mean_tpot_ms"]
        assert report["median_itl_ms"] == 0
        assert report["p90_itl_ms"] == pytest.approx(1000 * np.quantile(latencies, 0.9), rel=2 * RELATIVE_ERROR)
        assert (report["max_itl_ms"], report["max_gap_ms"]) == (1000, 1000)
        assert report["mean_gap_ms"] == pytest.approx(1000 * np.mean(gaps))
        assert report["curves"]["itl"]["count"] == 5
    assert report_of([answer(0, [0.5, 1.0])])["tokens_together_share"] == 3 / 5
    held_back = report_of([answer(0, [1.5])])  # all but the first wait for the last
    assert held_back["mean_itl_ms"] == pytest.approx(300)
    assert held_back["p90_itl_ms"] > 1000 * np.quantile(latencies, 0.9)
    assert held_back["tokens_together_share"] == 4 / 5
    assert report_of([])["tokens_together_share"] is None


def test_throughput_is_of_completed_requests_over_the_duration() -> None:
    records = some_records()
    done = completed(records)
    report = report_of(records)
    prompts, answers = sum(r.prompt_tokens for r in done), sum(r.output_tokens for r in done)
    assert (report["completed"], report["failed"], report["errored"], report["num_prompts"]) == (len(done), 17, 17, 150)
    assert (report["total_input_tokens"], report["total_output_tokens"]) == (prompts, answers)
    assert report["partial_output_tokens"] == sum(r.output_tokens for r in records) - answers
    assert report["request_throughput"] == len(done) / SECONDS
    assert report["output_throughput"] == answers / SECONDS
    assert report["total_token_throughput"] == (prompts + answers) / SECONDS
    assert report["prefix_hit_rate"] == sum(r.cached_tokens or 0 for r in done) / prompts
    assert report["preemptions"] == sum(r.num_preemptions for r in records)
    assert report["error_counts"] == [{"outcome": "errored", "error": "connection reset", "count": 17}]


def test_answers_that_completed_with_too_few_tokens_are_counted() -> None:
    records = some_records(20)
    for record in records[:5]:  # the first has failed
        record.wanted_output_tokens = record.output_tokens + 1
    for record in records[5:]:
        record.wanted_output_tokens = record.output_tokens
    assert report_of(records)["short_answers"] == 4


def test_the_best_second_and_the_most_in_flight_equal_a_direct_count() -> None:
    records = some_records(60)
    report = report_of(records)
    seconds = np.zeros(200)
    for record in records:
        assert record.first_token is not None
        times = record.first_token + np.concatenate([[0.0], np.cumsum(record.gaps)])
        np.add.at(seconds, times.astype(int), 1)
    assert report["max_output_tokens_per_s"] == pytest.approx(seconds.max())
    at_once = [sum(other.sent <= record.sent < other.ended for other in records) for record in records]
    assert report["max_concurrent_requests"] == max(at_once)
    timeline = report["client_timeline"]
    widths = np.diff([0.0, *(2 * time for time in timeline["time"])])  # of spans whose middles these are: alike
    tokens = np.array(timeline["output_tokens_per_s"]) * widths[0]
    assert tokens.sum() == pytest.approx(sum(r.output_tokens for r in records), rel=0.01)


def test_goodput_counts_requests_that_meet_every_limit() -> None:
    records = some_records()
    report = report_of(records, goodput=GoodputLimits(ttft=150, tpot=31))
    quick = [r for r in completed(records) if r.ttft is not None and r.ttft <= 0.150]
    good = [r for r in quick if (r.tpot or 0.0) <= 0.031]
    assert report["request_goodput"] == len(good) / SECONDS
    assert report["goodput_limits"] == {"ttft": 150, "tpot": 31}
    assert report["goodput_shares"]["ttft"] == len(quick) / len(records)
    assert report["goodput_shares"]["all"] == len(good) / len(records)
    assert report_of(records)["request_goodput"] is None


def test_warm_up_is_counted_and_in_no_figure() -> None:
    records = some_records()
    before = report_of(records[20:])
    for record in records[:20]:
        record.is_warm_up = True
    after = report_of(records)
    assert (after.pop("warm_up"), after.pop("warm_up_failed")) == (20, 3)
    assert (before.pop("warm_up"), before.pop("warm_up_failed")) == (0, 0)
    assert {**before, "date": ""} == {**after, "date": ""}


def test_a_run_that_lags_behind_its_schedule_is_not_valid() -> None:
    records = some_records()
    assert report_of(records)["valid"]
    for record in records[:3]:  # 2 % of them: the p99 lies above
        record.arrival -= 0.7
    report = report_of(records)
    lags = [record.sent - record.arrival for record in records]
    for percentile in (50, 90, 99):
        assert report[f"replay_sched_lag_p{percentile}"] == pytest.approx(np.percentile(lags, percentile))
    assert not report["valid"]
    assert "p99 of the lag behind the schedule is 0.71 s, at most 0.5 s is allowed" in report["invalid_reason"]


def test_an_interrupted_run_keeps_what_it_has_and_is_not_valid() -> None:
    run = Run("a run", {})
    for record in some_records(20):
        run.add(record)
    run.end(3.0, "the engine died")
    report = summarize(run)
    assert (report["valid"], report["duration"]) == (False, 3.0)
    assert report["invalid_reason"] == "the run was interrupted: the engine died"
    assert report["median_ttft_ms"] > 0


def test_an_empty_run_has_no_latencies_and_is_not_valid() -> None:
    report = report_of([])
    assert report["invalid_reason"] == "no request completed"
    assert report["median_ttft_ms"] is None
    assert report["prefix_hit_rate"] is None
    assert report["curves"].keys() == {"shares"}


def test_a_run_is_not_summarized_before_its_end() -> None:
    with pytest.raises(ValueError, match="'a run' has not ended; call end"):
        summarize(Run("a run", {}))


def test_without_cached_tokens_the_hit_rate_is_none_and_not_zero() -> None:
    records = some_records(10)
    for record in records:
        record.cached_tokens = None
    assert report_of(records)["prefix_hit_rate"] is None
    records[1].cached_tokens = 0
    assert report_of(records)["prefix_hit_rate"] == 0.0


def test_the_targets_counters_replace_missing_cached_tokens_of_answers() -> None:
    run = Run("a run", {})
    for record in some_records(10):
        record.cached_tokens = None
        run.add(record)
    run.sample(TargetSample(0.0, prompt_tokens=100, cached_tokens=90))
    run.sample(TargetSample(1.0, prompt_tokens=200, cached_tokens=100))
    run.sample(TargetSample(2.0, prompt_tokens=300, cached_tokens=140))
    run.end(SECONDS)
    report = summarize(run)
    assert (report["cached_tokens"], report["prefix_hit_rate"]) == (50, 0.25)


def test_figures_of_long_runs_stay_small() -> None:
    run = Run("a run", {})
    record = synthetic_record(0, np.random.default_rng(0))
    for index in range(5000):
        record.index = index
        run.add(record)
        run.sample(TargetSample(index / 10, running=1))
    run.end(500.0)
    report = summarize(run)
    rows, times = report["gantt"]["rows"], report["timeline"]["time"]
    assert 150 < len(rows) <= 300
    assert [row["index"] for row in rows] == list(range(0, 5000, report["gantt"]["every"]))
    assert 1000 < len(times) <= 2001
    assert times[-1] == 499.9
    assert report["timeline"].keys() == {"time", "running"}


def test_many_different_errors_are_counted_together() -> None:
    records = some_records(150)
    for record in records:
        record.outcome, record.error = Outcome.ERRORED, f"request {record.index} failed"
    counts = report_of(records)["error_counts"]
    assert len(counts) == 101
    assert counts[0] == {"outcome": "errored", "error": "other errors", "count": 50}


def test_details_have_every_request_in_the_order_of_the_workload() -> None:
    records = some_records(30)
    report = report_of(records[::-1], detailed=True)
    assert report["input_lens"] == [record.prompt_tokens for record in records]
    assert report["output_lens"] == [record.output_tokens for record in records]
    assert report["ttfts"] == [record.ttft for record in records]
    assert report["itls"] == [record.gaps.tolist() for record in records]
    assert report["errors"] == [record.error or "" for record in records]


def test_without_events_the_rows_have_the_phases_that_the_client_saw() -> None:
    record = synthetic_record(0, np.random.default_rng(0))
    record.phases = []
    row = report_of([record])["gantt"]["rows"][0]
    assert [kind for kind, *_ in row["phases"]] == ["first token", "decode"]
    assert report_of([record])["median_queue_ms"] is None


def test_the_report_has_the_load_of_each_engine() -> None:
    records = some_records(40)
    engines = report_of(records)["engines"]
    assert [engine["engine"] for engine in engines] == [0, 1, 2, 3]
    assert engines[1]["requests"] == 10
    assert engines[1]["prompt_tokens"] == sum(record.prompt_tokens for record in records[1::4])


def test_unsent_requests_are_unfinished_and_have_no_lag_and_no_engine() -> None:
    records = some_records(40)
    before = report_of(records)
    unsent = [
        RequestRecord(40 + place, 9.0, 9.0, 100, 10, ended=9.0, engine=1, was_sent=False) for place in range(1000)
    ]
    after = report_of([*records, *unsent])
    assert (after["num_prompts"], after["unfinished"]) == (1040, before["unfinished"] + 1000)
    for name in ("engines", "max_concurrent_requests", *(f"replay_sched_lag_p{share}" for share in (50, 90, 99))):
        assert after[name] == before[name]


def test_an_engine_without_requests_is_in_the_report() -> None:
    run = Run("a run", {"engines": 3})
    run.end(1.0)
    assert [engine["requests"] for engine in summarize(run)["engines"]] == [0, 0, 0]


def test_a_report_with_a_given_date_is_the_same_each_time() -> None:
    def make() -> str:
        run = Run("simulated", {"simulated": True, "date": "20260102-030405", "request_rate": float("inf")})
        for record in some_records(30):
            run.add(record)
        run.end(SECONDS)
        return json.dumps(summarize(run), default=str)

    assert make() == make()
    assert json.loads(make())["request_rate"] == "inf"


def test_a_report_has_the_fields_of_vllm() -> None:
    report = summarize(synthetic_run(requests=20))
    names = (
        "date backend model_id num_prompts request_rate burstiness max_concurrency duration completed failed "
        "total_input_tokens total_output_tokens request_throughput request_goodput output_throughput "
        "total_token_throughput max_output_tokens_per_s max_concurrent_requests mean_ttft_ms median_ttft_ms "
        "std_ttft_ms p99_ttft_ms p99.9_ttft_ms mean_tpot_ms mean_itl_ms mean_e2el_ms p90_e2el_ms"
    )
    assert set(names.split()) <= report.keys()
