"""Metrics of the engine, from the result of the utility call `stats`.

All clients of an engine get the same ones: if several frontends share an engine, take their `max`, not their sum.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from quire.frontend.metrics.prometheus import Families
from quire.protocol.messages import Ready
from quire.protocol.totals import EngineTotals

_PAGES = {
    "pages_free": "Free KV pages.",
    "pages_cached": "KV pages that only the prefix cache holds, evicted on demand.",
    "pages_held": "KV pages of running requests and pinned prefixes.",
    "pages_total": "KV pages.",
}

_COUNTERS = {
    "step": ("steps", "Steps."),
    "preemptions": ("preemptions", "Preemptions of requests."),
    "evictions": ("evictions", "Cached KV pages that were evicted."),
    "wasted_tokens": ("wasted_tokens", "Tokens computed again after a preemption."),
    "frames_refused": ("frames_refused", "Messages rejected as invalid."),
    "clients_silent": ("clients_silent", "Clients dropped because they sent no heartbeat."),
    "clients_gone": ("clients_gone", "Clients that disconnected without a goodbye."),
    "clients_slow": ("clients_slow", "Clients dropped because they did not read."),
    "outputs_merged": ("outputs_merged", "Increments merged because their client was slow."),
    "messages_dropped": ("messages_dropped", "Messages dropped because their client had left."),
}


def add_engine(families: Families, stats: Mapping[str, Any]) -> None:
    """Add the engine's statistics."""
    running, waiting, deferred = stats["running"], stats["waiting"], stats["deferred"]
    reasons = {"capacity": waiting - deferred, "deferred": deferred}
    families.gauge("num_requests_running", "Requests in the running batch.", running)
    families.gauge("num_requests_waiting", "Waiting requests.", waiting)
    families.gauges("num_requests_waiting_by_reason", "Waiting requests by reason.", "reason", reasons)
    usage = stats["pages_held"] / stats["pages_total"]
    families.gauge("kv_cache_usage_perc", "Share of the KV pages that requests hold, 0 to 1.", usage)
    for field, text in _PAGES.items():
        name = "kv_pages" if field == "pages_total" else f"kv_{field}"
        families.gauge(name, text, stats[field])
    text = "Preemptions of requests: engine_preemptions under vLLM's name."
    families.counter("num_preemptions", text, stats["preemptions"])
    families.gauge("engine_clients", "Clients of the engine.", stats["clients"])
    for field, (name, text) in _COUNTERS.items():
        families.counter(f"engine_{name}", text, stats[field])
    _add_totals(families, msgspec.convert(stats["totals"], EngineTotals))


def add_configuration(families: Families, ready: Ready) -> None:
    """Add `cache_config_info`: the KV memory in labels. `num_gpu_blocks` is vLLM's name for the number of pages."""
    labels = {
        "block_size": ready.block_size,
        "cache_dtype": ready.kv_cache_dtype,
        "enable_prefix_caching": "" if ready.shape is None else ready.shape.enable_prefix_caching,
        "kv_cache_memory_bytes": ready.kv_cache_bytes,
        "num_gpu_blocks": ready.num_pages,
        "num_pages": ready.num_pages,
    }
    text = "Configuration of the KV memory, in labels."
    families.gauge("cache_config_info", text, 1, **{name: str(value) for name, value in labels.items()})


def _add_totals(families: Families, totals: EngineTotals) -> None:
    families.counter("engine_prefill_tokens", "Prefill tokens, also recomputed ones.", totals.prefill_tokens)
    families.counter("engine_decode_tokens", "Decode tokens computed.", totals.decode_tokens)
    families.counter("engine_prefix_cache_queries", "Prompt tokens of scheduled requests.", totals.prompt_tokens)
    families.counter("engine_prefix_cache_hits", "Prompt tokens found in the prefix cache.", totals.cached_tokens)
    phases = {
        ("schedule",): totals.schedule_seconds,
        ("execute",): totals.execute_seconds,
        ("update",): totals.update_seconds,
    }
    families.counters("engine_step_phase_seconds", "Time of steps by phase.", ("phase",), phases.items())
    families.histogram("engine_step_seconds", "Duration of steps.", totals.step_seconds)
    families.histogram("iteration_tokens_total", "Tokens per step.", totals.step_tokens)
