"""Metrics of the engine, from its answer to the utility call `stats`.

All clients of an engine get the same ones: where several frontends share it, take one of them (`max`), not their sum.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from quire.frontend.metrics.families import Families
from quire.protocol.messages import Ready
from quire.protocol.totals import EngineTotals

_PAGES = {
    "pages_free": "KV pages that hold nothing.",
    "pages_cached": "KV pages kept for their prefixes, which give way when room is needed.",
    "pages_held": "KV pages of requests that run, and of pinned prefixes.",
    "pages_total": "KV pages.",
}

_COUNTERS = {
    "step": ("steps", "Steps."),
    "preemptions": ("preemptions", "Requests that had to give way to others."),
    "evictions": ("evictions", "Cached KV pages that had to make room."),
    "wasted_tokens": ("wasted_tokens", "Tokens computed again after a preemption."),
    "frames_refused": ("frames_refused", "Messages that could not be read."),
    "clients_silent": ("clients_silent", "Clients given up since they sent no heartbeat."),
    "clients_gone": ("clients_gone", "Clients that vanished."),
    "clients_slow": ("clients_slow", "Clients given up since they did not read."),
    "outputs_merged": ("outputs_merged", "Increments merged since their client was slow."),
    "messages_dropped": ("messages_dropped", "Messages to clients that had left."),
}


def add_engine(families: Families, stats: Mapping[str, Any]) -> None:
    """Writes what the engine has answered."""
    running, waiting, deferred = stats["running"], stats["waiting"], stats["deferred"]
    reasons = {"capacity": waiting - deferred, "deferred": deferred}
    families.gauge("num_requests_running", "Requests in the running batch.", running)
    families.gauge("num_requests_waiting", "Requests that wait to run.", waiting)
    families.gauges("num_requests_waiting_by_reason", "Requests that wait, by what for.", "reason", reasons)
    usage = stats["pages_held"] / stats["pages_total"]
    families.gauge("kv_cache_usage_perc", "Share of the KV pages that requests hold, 0 to 1.", usage)
    for field, text in _PAGES.items():
        name = "kv_pages" if field == "pages_total" else f"kv_{field}"
        families.gauge(name, text, stats[field])
    text = "Requests that had to give way, as they do: engine_preemptions by vLLM's name."
    families.counter("num_preemptions", text, stats["preemptions"])
    families.gauge("engine_clients", "Clients of the engine.", stats["clients"])
    for field, (name, text) in _COUNTERS.items():
        families.counter(f"engine_{name}", text, stats[field])
    _add_totals(families, msgspec.convert(stats["totals"], EngineTotals))


def add_configuration(families: Families, ready: Ready) -> None:
    """Writes `cache_config_info`: the KV memory, in labels. `num_gpu_blocks` is vLLM's word for the number of pages."""
    labels = {
        "block_size": ready.block_size,
        "cache_dtype": ready.kv_cache_dtype,
        "enable_prefix_caching": "" if ready.shape is None else ready.shape.enable_prefix_caching,
        "kv_cache_memory_bytes": ready.kv_cache_bytes,
        "num_gpu_blocks": ready.num_pages,
        "num_pages": ready.num_pages,
    }
    text = "The configuration of the KV memory, in labels."
    families.gauge("cache_config_info", text, 1, **{name: str(value) for name, value in labels.items()})


def _add_totals(families: Families, totals: EngineTotals) -> None:
    families.counter("engine_prefill_tokens", "Tokens computed of prompts, and again.", totals.prefill_tokens)
    families.counter("engine_decode_tokens", "Tokens computed in decodes.", totals.decode_tokens)
    families.counter("engine_prefix_cache_queries", "Prompt tokens of requests that started.", totals.prompt_tokens)
    families.counter("engine_prefix_cache_hits", "Those of them found in the prefix cache.", totals.cached_tokens)
    phases = {
        ("schedule",): totals.schedule_seconds,
        ("execute",): totals.execute_seconds,
        ("update",): totals.update_seconds,
    }
    families.counters("engine_step_phase_seconds", "Where the time of steps went.", ("phase",), phases.items())
    families.histogram("engine_step_seconds", "How long a step took.", totals.step_seconds)
    families.histogram("iteration_tokens_total", "Tokens of a step.", totals.step_tokens)
