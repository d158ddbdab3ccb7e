"""Metrics that routers of Kubernetes read, beside those that vLLM's dashboards read too.

The router of vLLM's production stack knows `gpu_cache_usage_perc` and `gpu_prefix_cache_*`, older names of vLLM. The
endpoint picker of the Gateway API inference extension (v1.5) takes an endpoint that lacks `lora_requests_info` for
unhealthy; llm-d's does not. That is in `metrics/adapters.py`, and all that these read besides in `metrics/engine.py`.
"""

from __future__ import annotations

from quire.frontend.metrics.prometheus import Families
from quire.protocol.totals import EngineTotals


def add_router_metrics(families: Families, usage: float, totals: EngineTotals) -> None:
    """Add the names for routers; `usage` is the share of the KV pages that requests hold."""
    families.gauge("gpu_cache_usage_perc", "kv_cache_usage_perc under vLLM's older name.", usage)
    text = "engine_prefix_cache_queries under vLLM's older name."
    families.counter("gpu_prefix_cache_queries", text, totals.prompt_tokens)
    text = "engine_prefix_cache_hits under vLLM's older name."
    families.counter("gpu_prefix_cache_hits", text, totals.cached_tokens)
