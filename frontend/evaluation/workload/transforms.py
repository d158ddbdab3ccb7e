"""Transforms of workloads: each takes an iterator of requests, returns another, and holds one request at a time.

They apply in this order: `start`, `duration` and `max_requests` of `read_trace`, which are in the trace's own time,
`speed_up`, `scale_lengths`, `clip`, and last `arrivals`, which may replace the times.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from functools import lru_cache

from msgspec.structs import replace

from quire.frontend.evaluation.workload.blocks import joined
from quire.frontend.evaluation.workload.request import WorkloadRequest

_TOLERANCE = 0.05  # of a scaled block's length, which is a whole number
_MOST_JOINED = 1 << 16  # blocks; more than any prompt has


def speed_up(requests: Iterable[WorkloadRequest], speed: float) -> Iterator[WorkloadRequest]:
    """Divide arrivals, and delays within sessions, by `speed`. Raises ValueError unless 0 < speed < inf."""
    _check_factor("speed", speed)
    for request in requests:
        yield replace(request, arrival=request.arrival / speed, delay=request.delay / speed)


def scale_lengths(
    requests: Iterable[WorkloadRequest], factor: float, output_factor: float | None = None
) -> Iterator[WorkloadRequest]:
    """Multiply prompt lengths by `factor`, output lengths by `output_factor` (None: `factor`); at least 1 token each.

    Blocks are scaled as well, so that prompts share what they did before. A block's length is a whole number; where
    rounding would be more than 5 % off, the fewest consecutive blocks that do better are joined into one, and prompts
    then share only whole joined blocks. A text prompt stays as it is. Raises ValueError for a factor that is not above
    0.
    """
    output_factor = factor if output_factor is None else output_factor
    _check_factor("factor", factor)
    _check_factor("output_factor", output_factor)
    for request in requests:
        scaled = request if _is_text(request) or factor == 1 else _scaled_prompt(request, factor)
        yield replace(scaled, output_tokens=max(1, round(request.output_tokens * output_factor)))


def clip(requests: Iterable[WorkloadRequest], max_model_len: int) -> Iterator[WorkloadRequest]:
    """Cut requests to the context length: prompts at their end, so that they keep their shared prefixes.

    The prompt is cut first, and the output only where it takes more than half of the context. With a text prompt only
    the output is cut, to 1 token at least. Without this the target refuses such requests, and they are counted. Raises
    ValueError for a context of less than 2 tokens.
    """
    if max_model_len < 2:
        raise ValueError(f"max_model_len={max_model_len} holds no prompt and answer; it must be at least 2")
    for request in requests:
        if request.prompt_tokens + request.output_tokens <= max_model_len:
            yield request
        elif _is_text(request):
            yield replace(request, output_tokens=max(1, max_model_len - request.prompt_tokens))
        else:
            yield _clipped(request, max_model_len)


def _clipped(request: WorkloadRequest, max_model_len: int) -> WorkloadRequest:
    room = max(max_model_len - request.prompt_tokens, max_model_len // 2)
    output_tokens = min(request.output_tokens, room)
    prompt_tokens = min(request.prompt_tokens, max_model_len - output_tokens)
    num_blocks = -(-prompt_tokens // request.block_tokens)
    return replace(
        request, prompt_tokens=prompt_tokens, output_tokens=output_tokens, blocks=request.blocks[:num_blocks]
    )


def _scaled_prompt(request: WorkloadRequest, factor: float) -> WorkloadRequest:
    """Scale a prompt. Full blocks stay full and the last one is not empty, so the number of blocks is right."""
    count = _num_to_join(request.block_tokens, factor)
    block_tokens = max(1, round(request.block_tokens * count * factor))
    blocks = request.blocks
    if count > 1:
        blocks = tuple(joined(blocks[first : first + count]) for first in range(0, len(blocks), count))
    last = request.prompt_tokens - (len(blocks) - 1) * count * request.block_tokens
    last = min(max(1, round(last * factor)), block_tokens)
    return replace(
        request, prompt_tokens=(len(blocks) - 1) * block_tokens + last, blocks=blocks, block_tokens=block_tokens
    )


@lru_cache(maxsize=64)
def _num_to_join(block_tokens: int, factor: float) -> int:
    """Return the number of blocks to join, so that the scaled length is within the tolerance."""
    exact = block_tokens * factor
    enough = 1 / (2 * _TOLERANCE)  # tokens, of which half a one is within the tolerance
    for count in range(1, math.ceil(min(enough / exact, _MOST_JOINED)) + 1):
        if abs(round(exact * count) - exact * count) <= _TOLERANCE * exact * count:
            return count
    return _MOST_JOINED


def _is_text(request: WorkloadRequest) -> bool:
    return request.text is not None or request.messages is not None


def _check_factor(name: str, factor: float) -> None:
    if not 0 < factor < math.inf:
        raise ValueError(f"{name}={factor} is out of range; it must be a finite number above 0")
