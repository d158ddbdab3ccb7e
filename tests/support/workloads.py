"""Workloads for tests, whose prompts share what earlier ones begin with."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from quire.frontend.evaluation.workload.request import WorkloadRequest


@st.composite
def workloads(draw: st.DrawFn, block_tokens: Sequence[int] = (24, 32, 100)) -> list[WorkloadRequest]:
    """Requests in order of arrival. The blocks are named as in Mooncake: an id tells all that is before it as well."""
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
    """The length of what both begin with."""
    for place, (mine, yours) in enumerate(zip(one, other, strict=False)):
        if mine != yours:
            return place
    return min(len(one), len(other))
