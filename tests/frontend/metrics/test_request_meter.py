"""The histograms of requests, with two independent clocks."""

from __future__ import annotations

import pytest
from parsed_metrics import ParsedMetrics
from prometheus_client import CollectorRegistry, generate_latest

from quire.frontend.client.observer import DEFAULT_OPTIONS
from quire.frontend.client.request import GenerationRequest
from quire.frontend.client.request_table import RequestTable
from quire.frontend.metrics.prometheus import Families
from quire.frontend.metrics.recent import RecentRates
from quire.frontend.metrics.requests import RequestMeter
from quire.frontend.sampling import SamplingParams, engine_params
from quire.frontend.text.prompts import Prompt
from quire.protocol.messages import (
    EngineCoreEvent,
    EngineCoreOutput,
    EngineCoreOutputs,
    ErrorKind,
    EventType,
    FinishReason,
)

ENGINE = 1000.0  # the engine's clock when the frontend's is 0


class MeteredTable:
    """A request table with its observers, for which the test acts as the engine."""

    def __init__(self) -> None:
        self.now = 0.0
        self.table = RequestTable(lambda _message, _session: None, [], clock=lambda: self.now)
        self.meter = RequestMeter(max_model_len=128)
        self.rates = RecentRates(clock=lambda: self.now)
        self.table.add_observer(self.meter)
        self.table.add_observer(self.rates)

    def submit(self, params: SamplingParams, num_prompt_tokens: int = 3) -> GenerationRequest:
        prompt, each = Prompt([7] * num_prompt_tokens), engine_params(params, 0, None)
        request = GenerationRequest("mine", prompt, params, each, None, arrival_time=self.now, options=DEFAULT_OPTIONS)
        self.table.submit(request)
        return request

    def receive(self, now: float, *outputs: EngineCoreOutput) -> None:
        self.now = now
        self.table.update(EngineCoreOutputs(list(outputs), None, ENGINE + now))

    @property
    def metrics_now(self) -> ParsedMetrics:
        families = Families("quire", {})
        self.meter.add_to(families)
        registry = CollectorRegistry()
        registry.register(families)
        return ParsedMetrics(generate_latest(registry))


def event(kind: EventType, time: float) -> EngineCoreEvent:
    return EngineCoreEvent(kind, ENGINE + time)


def first(request_id: str, *token_ids: int) -> EngineCoreOutput:
    """First output: queued at 0.1, scheduled at 0.3, first token at 0.8; one preemption, one cached prompt token."""
    events = [
        event(EventType.QUEUED, 0.1),
        event(EventType.SCHEDULED, 0.3),
        event(EventType.PREEMPTED, 0.4),
        event(EventType.SCHEDULED, 0.5),
        event(EventType.FIRST_TOKEN, 0.8),
    ]
    return EngineCoreOutput(request_id, list(token_ids), events=events, num_cached_tokens=1)


def last(request_id: str, time: float, *token_ids: int, reason: FinishReason = FinishReason.LENGTH) -> EngineCoreOutput:
    end = [event(EventType.FINISHED, time)]
    return EngineCoreOutput(request_id, list(token_ids), finish_reason=reason, events=end)


def test_times_are_measured_by_their_clocks() -> None:
    frontend = MeteredTable()
    frontend.submit(SamplingParams(max_tokens=4))
    frontend.receive(1.0, first("0", 1))
    frontend.receive(1.25, EngineCoreOutput("0", [2, 3]))
    frontend.receive(1.75, last("0", 1.5, 4))
    metrics = frontend.metrics_now
    assert metrics["quire:generation_tokens_together_total"] == 1
    for name, seconds in {
        "time_to_first_token_seconds": 1.0,
        "inter_token_latency_seconds": 0.25 + 0.5,
        "inter_token_latency_fine_seconds": 0.25 + 0.5,
        "request_time_per_output_token_seconds": (1.75 - 1.0) / 3,
        "e2e_request_latency_seconds": 1.75,
        "request_queue_time_seconds": 0.3 - 0.1,
        "request_queue_time_fine_seconds": 0.3 - 0.1,
        "request_prefill_time_seconds": 0.8 - 0.3,
        "request_decode_time_seconds": 1.5 - 0.8,
        "request_inference_time_seconds": 1.5 - 0.3,
    }.items():
        assert metrics[f"quire:{name}_sum"] == pytest.approx(seconds), name
        assert metrics[f"quire:{name}_count"] == (2 if name.startswith("inter") else 1), name
    assert metrics.get("quire:inter_token_latency_seconds_bucket", le="0.2") == 0
    assert metrics.get("quire:inter_token_latency_seconds_bucket", le="0.3") == 1
    assert metrics.get("quire:inter_token_latency_seconds_bucket", le="0.5") == 2


def test_tokens_and_sizes() -> None:
    frontend = MeteredTable()
    frontend.submit(SamplingParams(max_tokens=None, n=2), num_prompt_tokens=28)
    frontend.receive(1.0, first("0", 1))
    frontend.receive(1.5, EngineCoreOutput("1", [1, 2]))
    frontend.receive(2.0, last("1", 2.0, reason=FinishReason.STOP))
    assert frontend.metrics_now["quire:requests_in_flight"] == 1
    frontend.receive(3.0, last("0", 3.0, 5, 6, 7))
    metrics = frontend.metrics_now
    assert metrics["quire:requests_in_flight"] == 0
    assert metrics["quire:generation_tokens_together_total"] == 3  # a completion's first increment counts too
    assert metrics["quire:prompt_tokens_total"] == metrics["quire:request_prompt_tokens_sum"] == 28
    assert metrics["quire:prompt_tokens_cached_total"] == 1
    assert metrics.get("quire:prompt_tokens_by_source_total", source="local_compute") == 27
    assert metrics.get("quire:prompt_tokens_by_source_total", source="local_cache_hit") == 1
    assert metrics["quire:generation_tokens_total"] == metrics["quire:request_generation_tokens_sum"] == 6
    assert metrics["quire:request_params_max_tokens_sum"] == 128 - 28
    assert metrics["quire:request_params_n_sum"] == 2
    assert metrics["quire:request_num_preemptions_sum"] == 1
    assert metrics["quire:time_to_first_token_seconds_count"] == 1  # one of the request, not of each completion
    assert metrics["quire:inter_token_latency_seconds_sum"] == 2.0
    assert metrics["quire:request_time_per_output_token_seconds_sum"] == pytest.approx((3.0 - 1.0) / 3)
    assert metrics.get("quire:request_success_total", finished_reason="length") == 1
    assert metrics.get("quire:request_success_total", finished_reason="stop") == 0


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (ErrorKind.OVERLOADED, "queue_full"),
        (ErrorKind.SHUTTING_DOWN, "shutting_down"),
        (ErrorKind.INVALID, "invalid"),
        (ErrorKind.UNAVAILABLE, "unavailable"),
    ],
)
def test_a_rejected_request_is_counted_as_such_and_nowhere_else(kind: ErrorKind, reason: str) -> None:
    frontend = MeteredTable()
    frontend.submit(SamplingParams())
    frontend.receive(1.0, EngineCoreOutput("0", finish_reason=FinishReason.ERROR, error="no", error_kind=kind))
    metrics = frontend.metrics_now
    assert metrics.get("quire:admission_rejections_total", reason=reason) == 1
    assert metrics.get("quire:request_success_total", finished_reason="error") == 0
    assert metrics["quire:e2e_request_latency_seconds_count"] == metrics["quire:requests_in_flight"] == 0


def test_a_request_that_fails_is_an_error() -> None:
    frontend = MeteredTable()
    frontend.submit(SamplingParams())
    frontend.receive(1.0, first("0", 1))
    failure = EngineCoreOutput("0", finish_reason=FinishReason.ERROR, error="no", error_kind=ErrorKind.FAILED)
    frontend.receive(2.0, failure)
    metrics = frontend.metrics_now
    assert metrics.get("quire:request_success_total", finished_reason="error") == 1
    assert metrics["quire:e2e_request_latency_seconds_sum"] == 2.0


def test_a_request_that_cannot_be_sent_is_not_counted() -> None:
    frontend = MeteredTable()

    def fail(_message: object, _session: object) -> None:
        raise RuntimeError("the engine is dead")

    frontend.table._send = fail
    with pytest.raises(RuntimeError, match="dead"):
        frontend.submit(SamplingParams())
    metrics = frontend.metrics_now
    assert metrics["quire:requests_in_flight"] == metrics["quire:e2e_request_latency_seconds_count"] == 0


def test_recent_rates_hold_the_last_minute() -> None:
    frontend = MeteredTable()
    frontend.submit(SamplingParams(max_tokens=1000))
    frontend.receive(1.0, first("0", 1))
    frontend.receive(1.125, EngineCoreOutput("0", [2, 3]))
    frontend.receive(3.0, EngineCoreOutput("0", [4]))
    frontend.now = 3.25
    points = {point.time: point for point in frontend.rates.points()}
    assert len(points) == 240
    assert max(points) == 3.0
    assert (points[1.0].tokens_per_second, points[1.0].ttft, points[1.0].itl) == (12.0, 1.0, 0.0625)
    assert (points[2.0].tokens_per_second, points[2.0].ttft, points[2.0].itl) == (0.0, None, None)
    assert (points[3.0].tokens_per_second, points[3.0].ttft, points[3.0].itl) == (4.0, None, 1.875)
    frontend.now = 62.0
    assert [point.time for point in frontend.rates.points() if point.tokens_per_second] == [3.0]
    frontend.now = 64.0
    assert not any(point.tokens_per_second for point in frontend.rates.points())
