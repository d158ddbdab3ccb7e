"""Prometheus parser: a target's state from its metrics page."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress

from quire.frontend.evaluation.replay.record import TargetSample

# Names after the prefix quire, vllm or llamacpp; the first that exists counts.
_NAMES = {
    "running": ("num_requests_running", "requests_processing"),
    "waiting": ("num_requests_waiting", "requests_deferred"),
    "pages_held": ("kv_pages_held",),
    "pages_cached": ("kv_pages_cached",),
    "pages_total": ("kv_pages",),
    "prompt_tokens": ("engine_prefix_cache_queries_total", "prefix_cache_queries_total", "prompt_tokens_total"),
    "cached_tokens": ("engine_prefix_cache_hits_total", "prefix_cache_hits_total"),
    "output_tokens": ("generation_tokens_total", "tokens_predicted_total"),
}
_BLOCKS = 'num_gpu_blocks="'


def sample_of(text: str, time: float) -> TargetSample | None:
    """Return the state on a page in Prometheus' text format, summed over all engines; None if it has no requests.

    vLLM has no counts of used pages, but their total in a label, and the share of them that is in use.
    """
    values = _values(text)
    found = {
        field: int(values[name])
        for field, names in _NAMES.items()
        if (name := next((name for name in names if name in values), None)) is not None
    }
    if "running" not in found:
        return None
    if "pages_total" not in found and (blocks := _num_blocks(text)):
        found["pages_total"] = blocks
        found["pages_held"] = round(values.get("kv_cache_usage_perc", 0.0) * blocks)
    return TargetSample(time, **found)


def _values(text: str) -> Mapping[str, float]:
    """Return the sum of each metric's samples, by its name without the prefix."""
    values: defaultdict[str, float] = defaultdict(float)
    for line in text.splitlines():
        if line.startswith("#") or ":" not in line:
            continue
        series, _, rest = line.rpartition("} ") if "}" in line else line.partition(" ")
        name = series.partition("{")[0].partition(":")[2]
        with suppress(ValueError, IndexError):
            number = float(rest.split()[0])
            if math.isfinite(number):
                values[name] += number
    return values


def _num_blocks(text: str) -> int:
    _, found, rest = text.partition(_BLOCKS)
    number = rest.partition('"')[0]
    return int(number) if found and number.isdigit() else 0
