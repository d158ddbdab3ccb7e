"""Observability of a server: metrics, spans and the log."""

from __future__ import annotations

import gzip
import http.server
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from http_server import Server
from prometheus_client.parser import text_string_to_metric_families

BODY = {"prompt": "Once upon a time", "max_tokens": 8, "ignore_eos": True}
TRACE_ID = "0af7651916cd43dd8448eb211c80319c"


class SpanReceiver(http.server.BaseHTTPRequestHandler):
    """Receives spans like an OpenTelemetry collector."""

    bodies: list[bytes]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.bodies.append(gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body)
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def collector() -> Iterator[tuple[str, list[bytes]]]:
    SpanReceiver.bodies = []
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), SpanReceiver) as listener:
        threading.Thread(target=listener.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{listener.server_port}/v1/traces", SpanReceiver.bodies
        listener.shutdown()


def samples(server: Server) -> dict[str, float]:
    """Return the samples by name and labels, without the labels that all share."""
    values = {}
    for family in text_string_to_metric_families(server.request("/metrics").body.decode()):
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k not in ("model_name", "engine")}
            values[sample.name + "".join(f" {k}={v}" for k, v in sorted(labels.items()))] = sample.value
    return values


def test_dashboards_for_vllm_find_their_metrics(collector: tuple[str, list[bytes]]) -> None:
    endpoint, bodies = collector
    arguments = ["--metrics-prefix", "vllm", "--log-format", "json", "--otlp-traces-endpoint", endpoint]
    arguments += ["--trust-request-chat-template"]
    with Server.start(*arguments) as server:
        traced = {"traceparent": f"00-{TRACE_ID}-b7ad6b7169203331-01", "X-Request-Id": "mine-1"}
        reply = server.request("/v1/completions", BODY, headers=traced)
        assert reply.headers["x-request-id"] == "mine-1"
        assert server.request("/v1/completions", {**BODY, "stream": True, "n": 2}).status == 200
        assert server.request("/v1/completions", {**BODY, "max_tokens": 10**6}).status == 400
        assert server.request("/nothing/here").status == 404
        own = {"messages": [{"role": "user", "content": "x"}], "chat_template": "{{ messages[0].content * 2 }}"}
        assert server.request("/tokenize", own).json()["count"] == 2
        values = samples(server)
        server.check_pages()
        server.stop()
    assert values["vllm:generation_tokens_total"] == 24
    assert values["vllm:request_success_total finished_reason=length"] == 2
    assert values["vllm:time_to_first_token_seconds_count"] == 2
    assert values["vllm:num_requests_running"] == 0
    assert values["vllm:e2e_request_latency_seconds_bucket le=+Inf"] == 2
    ours = {name: value for name, value in values.items() if "http_requests_total" in name}
    assert {value for name, value in ours.items() if "/v1/completions" in name} == {2, 1}
    assert any("route=other" in name and "404" in name for name in ours), ours
    lines = [json.loads(line) for line in server.log]
    [mine] = [line for line in lines if line.get("request_id") == "mine-1"]
    assert (mine["path"], mine["status"], mine["method"]) == ("/v1/completions", 200, "POST")
    assert not any("Once upon" in line for line in server.log)
    assert not any(line.get("path") == "/metrics" for line in lines)
    spans = b"".join(bodies)
    assert bytes.fromhex(TRACE_ID) in spans
    assert reply.json()["id"].encode() in spans
    assert b"gen_ai.usage.output_tokens" in spans
