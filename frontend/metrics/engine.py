"""Metrics of an engine, from its statistics: the same for all its clients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from quire.frontend.metrics.prometheus import Families
from quire.frontend.metrics.routers import add_router_metrics
from quire.protocol.messages import Ready
from quire.protocol.totals import DraftTotals, EngineTotals

_PAGES = {
    "pages_free": "Free KV pages.",
    "pages_cached": "KV pages that only the prefix cache holds, evicted on demand.",
    "pages_held": "KV pages of running requests and pinned prefixes.",
    "pages_total": "KV pages.",
}

_STATES = {
    "states_free": "Free records of state.",
    "states_cached": "Records of state that only the prefix cache holds, evicted on demand.",
    "states_held": "Records of state of running requests and pinned prefixes.",
    "states_total": "Records of state, of a model that keeps it in place of KV.",
}

_COUNTERS = {
    "step": ("steps", "Steps."),
    "preemptions": ("preemptions", "Preemptions of requests."),
    "evictions": ("evictions", "Cached KV pages that were evicted."),
    "wasted_tokens": ("wasted_tokens", "Tokens computed again after a preemption."),
    "frames_refused": ("frames_refused", "Messages rejected as invalid."),
    "clients_silent": ("clients_silent", "Clients dropped because they neither sent nor read anything."),
    "clients_gone": ("clients_gone", "Clients that disconnected without a goodbye."),
    "clients_rejected": ("clients_rejected", "Clients rejected because as many as may were attached."),
    "clients_slow": ("clients_slow", "Clients dropped because they did not read."),
    "outputs_merged": ("outputs_merged", "Increments merged because their client was slow."),
    "memory_sheddings": ("memory_sheddings", "Times that memory was given back near the limit."),
    "messages_dropped": ("messages_dropped", "Messages dropped because their client had left."),
}


_TIER_GAUGES = {
    "kv_host_pages": "KV pages of a GPU in host memory.",
    "kv_host_pages_total": "KV pages of a GPU for which there is room in host memory.",
    "kv_disk_pages": "KV pages on disk.",
    "kv_disk_pages_total": "KV pages for which there is room on disk.",
    "kv_peer_connected": "1 if KV pages can be fetched from another engine.",
}
_TIER_COUNTERS = {
    "kv_host_pages_read": "KV pages that came back from host memory.",
    "kv_host_pages_written": "KV pages written to host memory.",
    "kv_host_pages_evicted": "KV pages evicted from host memory.",
    "kv_host_pages_skipped": "KV pages not written to host memory, as they were evicted first.",
    "kv_host_failures": "Damaged KV pages, and failures to use host memory.",
    "kv_host_read_seconds": "Time in which KV pages were read from host memory.",
    "kv_disk_pages_read": "KV pages that came back from disk.",
    "kv_disk_pages_written": "KV pages written to disk.",
    "kv_disk_pages_evicted": "KV pages evicted from disk.",
    "kv_disk_pages_skipped": "KV pages not written, as they were evicted first or the disk failed.",
    "kv_disk_failures": "Damaged KV pages, and failures to use the folder.",
    "kv_disk_read_seconds": "Time in which KV pages were read from disk.",
    "kv_peer_pages_fetched": "KV pages fetched from another engine.",
    "kv_peer_pages_served": "KV pages sent to other engines.",
    "kv_peer_failures": "Damaged KV pages from another engine, and times that it was lost or refused.",
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
    if stats["states_total"]:
        for field, text in _STATES.items():
            families.gauge("states" if field == "states_total" else field, text, stats[field])
        families.counter("state_evictions", "Cached records of state that were evicted.", stats["state_evictions"])
    text = "Preemptions of requests: engine_preemptions under vLLM's name."
    families.counter("num_preemptions", text, stats["preemptions"])
    for field, text in _TIER_GAUGES.items():
        if field in stats:
            families.gauge(field, text, stats[field])
    for field, text in _TIER_COUNTERS.items():
        if field in stats:
            families.counter(field, text, stats[field])
    families.gauge("engine_clients", "Clients of the engine.", stats["clients"])
    text = "Resident memory of the engine's process."
    families.gauge("engine_resident_memory_bytes", text, stats["resident_bytes"])
    text = "Memory that the engine's process may take (--memory-limit)."
    families.gauge("engine_memory_limit_bytes", text, stats["memory_limit"])
    for field, (name, text) in _COUNTERS.items():
        families.counter(f"engine_{name}", text, stats[field])
    totals = msgspec.convert(stats["totals"], EngineTotals)
    _add_totals(families, totals)
    add_router_metrics(families, usage, totals)


def add_configuration(families: Families, ready: Ready) -> None:
    """Add `cache_config_info`: the KV memory in labels. `num_gpu_blocks` is vLLM's name for the number of pages."""
    labels = {
        "block_size": ready.block_size,
        "cache_dtype": ready.kv_cache_dtype,
        "device": ready.device,
        "fast_matmul": ready.fast_matmul,
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
    _add_drafts(families, totals.speculation)
    phases = {
        ("schedule",): totals.schedule_seconds,
        ("execute",): totals.execute_seconds,
        ("update",): totals.update_seconds,
    }
    families.counters("engine_step_phase_seconds", "Time of steps by phase.", ("phase",), phases.items())
    families.histogram("engine_step_seconds", "Duration of steps.", totals.step_seconds)
    families.histogram("iteration_tokens_total", "Tokens per step.", totals.step_tokens)


def _add_drafts(families: Families, totals: DraftTotals) -> None:
    families.counter("spec_decode_num_drafts", "Times that tokens were drafted for a sequence.", totals.drafts)
    families.counter("spec_decode_num_draft_tokens", "Drafted tokens.", totals.draft_tokens)
    families.counter("spec_decode_num_accepted_tokens", "Drafted tokens that have held.", totals.accepted_tokens)
    text = "Drafted tokens that have held, by their position among the drafts."
    counts = {(str(position),): count for position, count in enumerate(totals.accepted_per_position)}
    families.counters("spec_decode_num_accepted_tokens_per_pos", text, ("position",), counts.items())
