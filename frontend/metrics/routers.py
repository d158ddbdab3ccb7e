"""Metrics that routers of Kubernetes read, beside those that vLLM's dashboards read too.

The router of vLLM's production stack knows `gpu_cache_usage_perc` and `gpu_prefix_cache_*`, older names of vLLM. The
endpoint picker of the Gateway API inference extension (v1.5) takes an endpoint that lacks `lora_requests_info` for
unhealthy; llm-d's does not. All that these read besides is in `metrics/engine.py`.
"""

from __future__ import annotations

import time

from quire.frontend.metrics.prometheus import Families
from quire.protocol.totals import EngineTotals


def add_router_metrics(families: Families, usage: float, totals: EngineTotals) -> None:
    """Add the names for routers; `usage` is the share of the KV pages that requests hold.

    The engine has no adapters: `max_lora` of `lora_requests_info` is 0, and both lists are empty. The value is a Unix
    time, as with vLLM, since pickers read the latest series.
    """
    families.gauge("gpu_cache_usage_perc", "kv_cache_usage_perc under vLLM's older name.", usage)
    text = "engine_prefix_cache_queries under vLLM's older name."
    families.counter("gpu_prefix_cache_queries", text, totals.prompt_tokens)
    text = "engine_prefix_cache_hits under vLLM's older name."
    families.counter("gpu_prefix_cache_hits", text, totals.cached_tokens)
    adapters = {"max_lora": "0", "running_lora_adapters": "", "waiting_lora_adapters": ""}
    families.gauge("lora_requests_info", "LoRA adapters, in labels: there are none.", time.time(), **adapters)
