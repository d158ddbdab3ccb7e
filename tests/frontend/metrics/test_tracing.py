"""Spans of real requests, in the memory of OpenTelemetry's SDK, and the ways to request them."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from patience import PATIENCE

from quire.frontend import LLM, AsyncLLM, RequestError, SamplingParams
from quire.frontend.client.observer import TraceContext
from quire.frontend.metrics.otlp import request_spans

pytest.importorskip("opentelemetry.sdk", reason="OpenTelemetry is not installed; `pip install '.[otel]'` brings it")

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from quire.frontend.metrics.tracing import RequestSpans

if TYPE_CHECKING:
    from conftest import EngineFactory

TRACE_ID, PARENT_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
HEADERS = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01", "tracestate": "vendor=1"}

Body = Callable[[AsyncLLM], Awaitable[None]]


@pytest.fixture(scope="module")
def llm(module_engine: EngineFactory, demo_model: Path) -> LLM:
    return module_engine(demo_model)


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_SDK_DISABLED"):
        monkeypatch.delenv(name, raising=False)


def spans_of(llm: LLM, body: Body) -> list[ReadableSpan]:
    """Return the spans that end while `body` runs."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))

    async def main() -> None:
        async with AsyncLLM(engine_address=llm.engine_address) as each, asyncio.timeout(PATIENCE):
            each.add_observer(RequestSpans(provider, "demo"))
            with provider.get_tracer("test").start_as_current_span("consumer"):
                await body(each)

    asyncio.run(main())
    return list(exporter.get_finished_spans())


async def complete(
    llm: AsyncLLM, params: SamplingParams, trace: TraceContext | None = None, name: str = "mine"
) -> None:
    async for _ in llm.generate("Once upon a time", params, name, trace=trace):
        pass


def test_a_span_has_parameters_usage_and_latencies(llm: LLM) -> None:
    params = SamplingParams(max_tokens=8, temperature=0.5, top_p=0.9, seed=3, ignore_eos=True)
    trace = TraceContext("chat", HEADERS, "chatcmpl-1")
    span, consumer = spans_of(llm, lambda each: complete(each, params, trace))
    assert (span.name, span.kind, span.status.status_code) == ("chat demo", SpanKind.SERVER, StatusCode.UNSET)
    assert span.context is not None
    assert span.parent is not None
    assert consumer.context is not None
    assert f"{span.context.trace_id:032x}" == TRACE_ID
    assert f"{span.parent.span_id:016x}" == PARENT_ID
    assert span.context.trace_state.get("vendor") == "1"
    attributes = dict(span.attributes or {})
    latencies = {name: attributes.pop(name) for name in list(attributes) if name.startswith("gen_ai.latency.")}
    num_prompt_tokens = attributes.pop("gen_ai.usage.input_tokens")
    assert isinstance(num_prompt_tokens, int)
    assert num_prompt_tokens > 0
    assert attributes == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "quire",
        "gen_ai.system": "quire",
        "gen_ai.request.model": "demo",
        "gen_ai.response.model": "demo",
        "gen_ai.response.id": "chatcmpl-1",
        "gen_ai.request.id": "mine",
        "gen_ai.request.n": 1,
        "gen_ai.request.max_tokens": 8,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.seed": 3,
        "gen_ai.usage.output_tokens": 8,
        "gen_ai.usage.prompt_tokens": num_prompt_tokens,
        "gen_ai.usage.completion_tokens": 8,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "gen_ai.response.finish_reasons": ("length",),
        "quire.route.engines": (0,),
        "quire.route.reasons": ("turn",),
    }
    names = ("time_to_first_token", "e2e", "time_in_queue", "time_in_model_prefill", "time_in_model_decode")
    assert latencies.keys() == {f"gen_ai.latency.{name}" for name in (*names, "time_in_model_inference")}
    assert all(isinstance(value, float) and 0 <= value < 60 for value in latencies.values())
    assert span.start_time is not None
    assert span.end_time is not None
    assert (span.end_time - span.start_time) / 1e9 == pytest.approx(latencies["gen_ai.latency.e2e"], abs=1e-3)


def test_the_span_of_an_embedding(llm: LLM) -> None:
    async def body(each: AsyncLLM) -> None:
        await each.embed("Once upon a time")

    span, _ = spans_of(llm, body)
    attributes = dict(span.attributes or {})
    assert span.name == "embeddings demo"
    assert attributes["gen_ai.usage.output_tokens"] == 0
    assert attributes["gen_ai.response.finish_reasons"] == ("stop",)
    assert "gen_ai.request.temperature" not in attributes


def test_without_a_header_the_consumers_span_is_the_parent(llm: LLM) -> None:
    span, consumer = spans_of(llm, lambda each: complete(each, SamplingParams(max_tokens=2)))
    assert span.name == "text_completion demo"
    assert span.parent is not None
    assert consumer.context is not None
    assert span.parent.span_id == consumer.context.span_id


def test_an_invalid_header_is_ignored(llm: LLM) -> None:
    trace = TraceContext(headers={"traceparent": "nonsense"})
    span, consumer = spans_of(llm, lambda each: complete(each, SamplingParams(max_tokens=2), trace))
    assert span.context is not None
    assert consumer.context is not None
    assert span.context.trace_id == consumer.context.trace_id


def test_requests_that_fail_or_are_aborted(engine: EngineFactory, demo_model: Path) -> None:
    async def body(each: AsyncLLM) -> None:
        stream = each.generate("Once", SamplingParams(max_tokens=1900, n=2, ignore_eos=True), "left")
        await anext(stream)
        await stream.aclose()
        calls = [complete(each, SamplingParams(max_tokens=50, ignore_eos=True), name=str(index)) for index in range(64)]
        results = await asyncio.gather(*calls, return_exceptions=True)
        rejected.extend(str(index) for index, result in enumerate(results) if isinstance(result, RequestError))

    rejected: list[str] = []
    spans = {
        str(span.attributes["gen_ai.request.id"]): span
        for span in spans_of(engine(demo_model, max_num_seqs=2, max_waiting_requests=2), body)
        if span.attributes
    }
    assert len(spans) == 65
    left = spans["left"].attributes or {}
    assert left["gen_ai.response.finish_reasons"] == ("abort", "abort")
    assert left["gen_ai.request.choice.count"] == 2
    errors = {name: span for name, span in spans.items() if span.status.status_code is StatusCode.ERROR}
    assert sorted(errors) == sorted(rejected) != []
    for span in errors.values():
        attributes = span.attributes or {}
        assert attributes["error.type"] == "overloaded"
        assert "gen_ai.latency.e2e" in attributes
        assert "gen_ai.latency.time_to_first_token" not in attributes


class TraceCollector(HTTPServer):
    """An OTLP collector that records the path and size of each export."""

    def __init__(self) -> None:
        self.received: list[tuple[str, int]] = []
        super().__init__(("127.0.0.1", 0), CollectorHandler)


class CollectorHandler(BaseHTTPRequestHandler):
    server: TraceCollector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.received.append((self.path, len(body)))
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002 - the base class has it so
        """Log nothing."""


@pytest.mark.parametrize("from_environment", [False, True])
def test_spans_are_sent_to_the_endpoint_of_the_flag_or_the_environment(
    llm: LLM, from_environment: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with TraceCollector() as collector:
        thread = threading.Thread(target=collector.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        endpoint = f"http://127.0.0.1:{collector.server_port}"
        if from_environment:
            monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)

        async def main() -> None:
            spans = request_spans(None if from_environment else f"{endpoint}/v1/traces", "demo")
            assert spans is not None
            async with AsyncLLM(engine_address=llm.engine_address) as each:
                each.add_observer(spans)
                await complete(each, SamplingParams(max_tokens=2))
            await asyncio.to_thread(spans.close)

        try:
            asyncio.run(main())
        finally:
            collector.shutdown()
            thread.join()
    [(path, size)] = collector.received
    assert path == "/v1/traces"
    assert size > 0


def test_spans_are_off_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    assert request_spans(None, "demo") is None
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://localhost:4318")
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert request_spans(None, "demo") is None
    monkeypatch.delenv("OTEL_SDK_DISABLED")
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "none")
    assert request_spans(None, "demo") is None


def test_an_invalid_endpoint_or_protocol_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="otlp_traces_endpoint='localhost:4317' is not a URL"):
        request_spans("localhost:4317", "demo")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    with pytest.raises(ValueError, match="OTEL_EXPORTER_OTLP_PROTOCOL=grpc is not supported; set it to http/protobuf"):
        request_spans("http://localhost:4317", "demo")


def test_opentelemetry_is_loaded_only_if_requested() -> None:
    code = """
import sys
import quire.frontend.metrics.server, quire.frontend.async_llm, quire.frontend.metrics.otlp as otlp
assert otlp.request_spans(None, "demo") is None
assert "opentelemetry" not in sys.modules
sys.modules["opentelemetry"] = None  # as if it were not installed
otlp.request_spans("http://localhost:4318/v1/traces", "demo")
"""
    ended = subprocess.run([sys.executable, "-P", "-c", code], check=False, capture_output=True, text=True)
    error = ended.stderr.splitlines()[-1]
    assert error.startswith("ValueError: --otlp-traces-endpoint http://localhost:4318/v1/traces requests spans, but")
    assert "pip install opentelemetry-sdk opentelemetry-exporter-otlp-proto-http" in error
