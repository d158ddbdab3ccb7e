"""What routers of Kubernetes read of a server: its metrics without an API key, as their sources parse them."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from http_server import Server
from parsed_metrics import ParsedMetrics

KEY = {"Authorization": "Bearer sk"}
BODY = {"prompt": "Once upon a time there was a little fox who lived in a wood", "max_tokens": 8, "ignore_eos": True}


@pytest.fixture(scope="module")
def replica() -> Iterator[Server]:
    """Start a server with the flags of scripts/deploy/kustomization.yaml."""
    with Server.start("--api-key", "sk", "--metrics-prefix", "vllm", "--metrics-without-key") as server:
        yield server


def scrape(server: Server) -> ParsedMetrics:
    reply = server.request("/metrics")
    assert reply.status == 200
    return ParsedMetrics(reply.body)


def test_the_endpoint_picker_finds_all_that_it_reads(replica: Server) -> None:
    """A gauge that the Gateway API inference extension or llm-d misses counts as a failure of the endpoint."""
    page = scrape(replica)
    for name in ("num_requests_waiting", "num_requests_running", "kv_cache_usage_perc"):
        [sample] = page.families[f"vllm:{name}"].samples
        assert sample.value == 0
    [cache] = page.families["vllm:cache_config_info"].samples
    configured = replica.request("/server_info", headers=KEY).json()["vllm_config"]["cache_config"]
    assert int(cache.labels["block_size"]) == configured["block_size"]
    assert int(cache.labels["num_gpu_blocks"]) == configured["num_blocks"]
    [adapters] = page.families["vllm:lora_requests_info"].samples
    assert int(adapters.labels["max_lora"]) == 0
    assert adapters.labels["running_lora_adapters"] == adapters.labels["waiting_lora_adapters"] == ""
    assert abs(adapters.value - time.time()) < 3600


def test_the_production_stack_finds_vllms_older_names(replica: Server) -> None:
    before = scrape(replica)
    for _ in range(2):
        assert replica.request("/v1/completions", BODY, headers=KEY).status == 200
    after = scrape(replica)
    assert after["vllm:gpu_cache_usage_perc"] == after["vllm:kv_cache_usage_perc"]
    for name in ("queries", "hits"):
        counted = f"prefix_cache_{name}_total"
        assert after[f"vllm:gpu_{counted}"] == after[f"vllm:engine_{counted}"]
    assert after["vllm:gpu_prefix_cache_queries_total"] > before["vllm:gpu_prefix_cache_queries_total"]


def test_only_metrics_and_probes_are_open(replica: Server) -> None:
    open_paths = ("/health", "/v1/health", "/ping", "/metrics")
    assert [replica.request(path).status for path in open_paths] == [200] * 4
    guarded = ("/v1/models", "/load", "/server_info", "/engines", "/metrics/x", "/Metrics", "//metrics")
    assert [replica.request(path).status for path in guarded] == [401] * len(guarded)
    for path in ("/v1/models", "/load", "/server_info"):
        assert replica.request(path, headers=KEY).status == 200
