"""How much is served when all of it is there at once."""

from __future__ import annotations

from typing import Any

from quire.frontend.evaluation.replay.load import Load

_AT_ONCE = 4096  # that an engine lets wait, unless told otherwise


def everything_at_once(warm_up: int = 0) -> Load:
    """All requests at the beginning; of more than an engine lets wait, the next as soon as one has ended."""
    return Load(concurrency=_AT_ONCE, warm_up=warm_up)


def throughput_fields(report: dict[str, Any]) -> dict[str, Any]:
    """The fields of `vllm bench throughput --output-json`, and tokens of answers a second, of a run's report."""
    tokens = report["total_input_tokens"] + report["total_output_tokens"]
    return {
        "elapsed_time": report["duration"],
        "num_requests": report["completed"],
        "total_num_tokens": tokens,
        "requests_per_second": report["request_throughput"],
        "tokens_per_second": report["total_token_throughput"],
        "output_tokens_per_second": report["output_throughput"],
    }
