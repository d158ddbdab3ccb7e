"""OpenTelemetry spans of requests, with `gen_ai.*` attributes. Needs the extra `otel`; import only if requested.

Attributes that begin with `gen_ai.latency` have vLLM's names; the other `gen_ai.*` are those of OpenTelemetry's
semantic conventions. Spans never contain text of prompts or answers.
"""

from __future__ import annotations

import os
import time

from opentelemetry.context import get_current
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from quire.frontend.client.observer import OpenRequest
from quire.frontend.errors import RequestError
from quire.protocol.messages import SamplingParams

_NANOSECONDS = 1_000_000_000
_PROPAGATOR = TraceContextTextMapPropagator()


class RequestSpans:
    """An `Observer` that creates a span for each request, from its arrival to its end.

    Its parent is given by the `traceparent` header of the request, or else the current span of its
    consumer. Times are measured by the same clocks as in `RequestMeter`.
    """

    def __init__(self, provider: TracerProvider, model_name: str) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("quire")
        self._model_name = model_name
        self._open: dict[OpenRequest, Span] = {}

    def close(self) -> None:
        """Send the remaining spans, and wait for that at most for the exporter's timeout."""
        self._provider.shutdown()

    def on_submitted(self, request: OpenRequest) -> None:
        """See `Observer`."""
        begin = time.time_ns() - round((time.monotonic() - request.metrics.arrival_time) * _NANOSECONDS)
        operation = request.options.trace.operation or "text_completion"
        self._open[request] = self._tracer.start_span(
            f"{operation} {self._model_of(request)}",
            _PROPAGATOR.extract(request.options.trace.headers, get_current()),
            SpanKind.SERVER,
            self._request_attributes(request, operation),
            start_time=begin,
        )

    def on_first_tokens(self, request: OpenRequest, timestamp: float) -> None:
        """See `Observer`."""

    def on_tokens(self, num_tokens: int, num_together: int, gaps: list[float], timestamp: float) -> None:
        """See `Observer`."""

    def on_finished(self, request: OpenRequest, timestamp: float) -> None:
        """See `Observer`."""
        if (span := self._open.pop(request, None)) is None:
            return
        if request.error is not None:
            span.set_status(Status(StatusCode.ERROR))
            span.set_attribute("error.type", _error_type(request.error))
        span.set_attributes(_response_attributes(request))
        span.set_attributes(_latencies(request, timestamp))
        span.end(time.time_ns() - round((time.monotonic() - timestamp) * _NANOSECONDS))

    def _model_of(self, request: OpenRequest) -> str:
        adapter = request.options.lora_request
        return self._model_name if adapter is None else adapter.lora_name

    def _request_attributes(self, request: OpenRequest, operation: str) -> dict[str, AttributeValue]:
        attributes: dict[str, AttributeValue] = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "quire",
            "gen_ai.system": "quire",  # the former name of provider.name
            "gen_ai.request.model": self._model_of(request),
            "gen_ai.response.model": self._model_of(request),
            "gen_ai.response.id": request.options.trace.response_id or request.request_id,
            "gen_ai.request.id": request.request_id,
        }
        return attributes | _sampling(request.params)


def open_request_spans(endpoint: str | None, model_name: str) -> RequestSpans:
    """Return spans that are sent over OTLP/HTTP to the URL `endpoint`, or as the OTEL_* environment says."""
    named = "OTEL_SERVICE_NAME" in os.environ or "service.name=" in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    provider = TracerProvider(resource=Resource.create({} if named else {SERVICE_NAME: "quire"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return RequestSpans(provider, model_name)


def _sampling(params: SamplingParams | None) -> dict[str, AttributeValue]:
    """Return the attributes of sampling parameters; none for an embedding."""
    if params is None:
        return {}
    attributes: dict[str, AttributeValue | None] = {
        "gen_ai.request.n": params.n,
        "gen_ai.request.choice.count": params.n if params.n != 1 else None,
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.top_k": params.top_k or None,
        "gen_ai.request.frequency_penalty": params.frequency_penalty or None,
        "gen_ai.request.presence_penalty": params.presence_penalty or None,
        "gen_ai.request.seed": params.seed,
    }
    return {name: value for name, value in attributes.items() if value is not None}


def _response_attributes(request: OpenRequest) -> dict[str, AttributeValue]:
    num_prompt_tokens, num_output_tokens = len(request.prompt.token_ids), request.num_output_tokens
    return {
        "gen_ai.usage.input_tokens": num_prompt_tokens,
        "gen_ai.usage.output_tokens": num_output_tokens,
        "gen_ai.usage.prompt_tokens": num_prompt_tokens,
        "gen_ai.usage.completion_tokens": num_output_tokens,
        "gen_ai.usage.cache_read.input_tokens": request.num_cached_tokens,
        "gen_ai.response.finish_reasons": request.finish_reasons,
        "quire.route.engines": [hop.engine for hop in request.metrics.route],
        "quire.route.reasons": [hop.reason for hop in request.metrics.route],
    }


def _latencies(request: OpenRequest, timestamp: float) -> dict[str, AttributeValue]:
    """Return the latencies in seconds; those of phases that did not happen are absent."""
    times = request.metrics
    spans = {
        "e2e": (times.arrival_time, timestamp),
        "time_to_first_token": (times.arrival_time, request.first_chunk_time),
        "time_in_queue": (times.queued_time, times.first_scheduled_time),
        "time_in_model_prefill": (times.first_scheduled_time, times.first_token_time),
        "time_in_model_decode": (times.first_token_time, times.last_token_time),
        "time_in_model_inference": (times.first_scheduled_time, times.last_token_time),
    }
    return {
        f"gen_ai.latency.{name}": end - begin
        for name, (begin, end) in spans.items()
        if begin is not None and end is not None
    }


def _error_type(error: Exception) -> str:
    return error.kind.name.lower() if isinstance(error, RequestError) else type(error).__name__
