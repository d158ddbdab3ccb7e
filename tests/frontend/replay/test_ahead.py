"""Requests are prepared before their time, and not one whenever one is sent."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from quire.frontend.replay.ahead import Ahead
from quire.frontend.workload.request import WorkloadRequest


def test_more_is_prepared_when_half_is_taken() -> None:
    prepared: list[WorkloadRequest] = []

    def requests() -> Iterator[WorkloadRequest]:
        for _ in range(100):
            yield WorkloadRequest(0.0, 1 << 17, 1, ())

    async def main() -> None:
        ahead = Ahead(requests(), prepared.append)
        await ahead.filled()
        assert len(prepared) == 8  # a million tokens
        for _ in range(3):
            assert await ahead.next() is not None
        await asyncio.sleep(0.05)
        assert len(prepared) == 8
        assert await ahead.next() is not None
        assert await ahead.next() is not None
        async with asyncio.timeout(10):
            await ahead.filled()
        assert len(prepared) == 13
        taken = 5
        while await ahead.next() is not None:
            taken += 1
        assert taken == 100
        ahead.close()

    asyncio.run(main())
