"""Workloads for tests, whose prompts share prefixes of earlier ones."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from quire.frontend.evaluation.workload.request import WorkloadRequest


@st.composite
def workloads(draw: st.DrawFn, block_tokens: Sequence[int] = (24, 32, 100)) -> list[WorkloadRequest]:
    """Generate requests in order of arrival. As in Mooncake, a block's name stands for all blocks before it too."""
    size = draw(st.sampled_from(block_tokens))
    requests: list[WorkloadRequest] = []
    fresh, arrival = 0, 0.0
    for _ in range(draw(st.integers(1, 12))):
        before: tuple[int, ...] = ()
        if draw(st.booleans()) and requests:
            earlier = draw(st.sampled_from(requests)).blocks
            before = earlier[: draw(st.integers(0, len(earlier)))]
        more = draw(st.integers(0 if before else 1, 6))
        blocks = (*before, *range(fresh, fresh + more))
        fresh += more
        tokens = (len(blocks) - 1) * size + draw(st.integers(1, size))
        arrival += draw(st.floats(0, 10))
        requests.append(WorkloadRequest(arrival, tokens, draw(st.integers(1, 500)), blocks, size))
    return requests


def lcp(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the length of the common prefix."""
    for place, (mine, yours) in enumerate(zip(one, other, strict=False)):
        if mine != yours:
            return place
    return min(len(one), len(other))
