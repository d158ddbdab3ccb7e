"""Warm-up: requests before a run, which bring a target to its usual speed."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import msgspec

from quire.frontend.evaluation.replay.load import Load
from quire.frontend.evaluation.replay.record import RequestRecord, RunClock
from quire.frontend.evaluation.replay.target import Target, Tokens, prepare, send_within
from quire.frontend.evaluation.workload.request import WorkloadRequest

_AT_ONCE = 16
_OTHER_BLOCKS = 1 << 40  # above the blocks of any trace


async def warm_up(
    target: Target, tokens: Tokens, requests: Sequence[WorkloadRequest], load: Load
) -> list[RequestRecord]:
    """Send requests of these lengths with other tokens, wait for them, and empty the prefix cache.

    Their times count from the call.
    """
    if not requests:
        return []
    clock = RunClock()
    room = asyncio.Semaphore(load.concurrency or load.max_concurrency or _AT_ONCE)
    records = [
        RequestRecord(index, 0.0, 0.0, request.prompt_tokens, request.output_tokens, is_warm_up=True)
        for index, request in enumerate(requests)
    ]

    async def send(request: WorkloadRequest, record: RequestRecord) -> None:
        prepared = await asyncio.to_thread(prepare, target, _apart(request), tokens)
        async with room:
            record.arrival = record.sent = clock.now()
            await send_within(load.request_timeout, prepared, record, clock)
            record.ended = clock.now()

    async with asyncio.TaskGroup() as group:
        for request, record in zip(requests, records, strict=True):
            group.create_task(send(request, record))
    await target.reset_cache()
    return records


def _apart(request: WorkloadRequest) -> WorkloadRequest:
    """Return a copy that shares no tokens with the workload, nor with an earlier warm-up of the same target.

    So it hits no cached prefix, and leaves none that the workload could hit. Text stays as it is.
    """
    first = _OTHER_BLOCKS + random.getrandbits(32)
    blocks = tuple(first + place for place in range(len(request.blocks)))
    return msgspec.structs.replace(request, blocks=blocks, session=None)
