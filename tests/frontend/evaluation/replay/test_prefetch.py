"""Requests are prepared ahead of their time, and not one by one as they are sent."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from patience import PATIENCE

from quire.frontend.evaluation.replay.prefetch import Prefetcher
from quire.frontend.evaluation.workload.request import WorkloadRequest


def test_prefetching_resumes_when_half_is_taken() -> None:
    taken = 0
    taken_before: list[int] = []  # value of `taken` when each request was prepared

    def requests() -> Iterator[WorkloadRequest]:
        for _ in range(100):
            yield WorkloadRequest(0.0, 1 << 17, 1, ())

    async def main() -> None:
        nonlocal taken
        prefetcher = Prefetcher(requests(), lambda _: taken_before.append(taken))
        try:
            await prefetcher.filled()
            assert taken_before == [0] * 8  # a million tokens
            while await prefetcher.next() is not None:
                taken += 1
                if taken == 5:
                    async with asyncio.timeout(PATIENCE):
                        await prefetcher.filled()
        finally:
            prefetcher.close()
        assert taken == 100
        assert taken_before[8] in (4, 5)  # the fifth is counted when it is there

    asyncio.run(main())
