"""Statistics of the prefixes that the prompts of a workload share."""

from __future__ import annotations

from collections.abc import Iterable

from quire.frontend.evaluation.workload.request import WorkloadRequest


def infinite_cache_hits(requests: Iterable[WorkloadRequest], block_size: int) -> int:
    """Return the prompt tokens that an unbounded prefix cache would hit, in full pages, serving requests one by one.

    As in the engine, at least one token of each prompt is left to compute. Answers are not matched, since a trace does
    not have them.
    """
    nodes: dict[tuple[int, int], int] = {}  # (node of the prefix, block): node
    computed: list[int] = []  # computed tokens of each node's block, in full pages
    hits = 0
    for request in requests:
        node, found, left = _root(request), 0, request.prompt_tokens // block_size * block_size
        is_cached = True
        for block in request.blocks:
            node = nodes.setdefault((node, block), len(computed))
            if node == len(computed):
                computed.append(0)
            tokens = min(left, request.block_tokens)
            if is_cached:
                found += min(tokens, computed[node])
                is_cached = computed[node] == request.block_tokens
            computed[node] = max(computed[node], tokens)
            left -= tokens
        hits += min(found, request.prompt_tokens - 1) // block_size * block_size
    return hits


def shared_blocks(requests: Iterable[WorkloadRequest]) -> float:
    """Return the share of blocks seen before with the same blocks in front: the figure that papers give of a trace."""
    nodes: dict[tuple[int, int], int] = {}  # (node of the prefix, block): node
    count = 0
    for request in requests:
        node = _root(request)
        for block in request.blocks:
            node = nodes.setdefault((node, block), len(nodes))
        count += len(request.blocks)
    return 1 - len(nodes) / count


def _root(request: WorkloadRequest) -> int:
    """Return a root for each block size, whose tokens differ; no other node has a negative number."""
    return -request.block_tokens
