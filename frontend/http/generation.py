"""Runs what one body asks for: several prompts as one stream, or all to their end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from quire.frontend.http.errors import ApiError
from quire.frontend.outputs import CompletionOutput, RequestOutput

Outputs = AsyncGenerator[RequestOutput, None]


async def last_of(outputs: Outputs) -> RequestOutput:
    """The last output of a stream, which holds everything."""
    last: RequestOutput | None = None
    async with aclosing(outputs):
        async for output in outputs:
            last = output
    assert last is not None  # a stream ends with a finished output, or raises
    check_deadline(last)
    return last


async def all_of(streams: Sequence[Outputs]) -> list[RequestOutput]:
    """The last output of each; when one fails, the others are aborted and its error is raised."""
    if len(streams) == 1:
        return [await last_of(streams[0])]
    tasks = [asyncio.ensure_future(last_of(stream)) for stream in streams]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def merged(streams: Sequence[Outputs]) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """The outputs of all as they come, each with the index of its stream."""
    if len(streams) == 1:
        async with aclosing(streams[0]) as outputs:
            async for output in outputs:
                yield 0, output
        return
    room = asyncio.Semaphore(len(streams))  # so that a consumer that waits holds them up
    queue: asyncio.Queue[tuple[int, RequestOutput] | None] = asyncio.Queue()

    async def forward(index: int, outputs: Outputs) -> None:
        async with aclosing(outputs):
            async for output in outputs:
                await room.acquire()
                queue.put_nowait((index, output))

    tasks = [asyncio.ensure_future(forward(index, stream)) for index, stream in enumerate(streams)]
    ended = asyncio.gather(*tasks)
    ended.add_done_callback(lambda _: queue.put_nowait(None))
    try:
        while (item := await queue.get()) is not None:
            room.release()
            yield item
        ended.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        if ended.done() and not ended.cancelled():
            ended.exception()  # it has been raised above


def check_deadline(output: RequestOutput) -> None:
    """Raises `ApiError` 504 when the time of a request was up before it had anything to show."""
    if all(each.finish_reason == "timeout" and not each.token_ids for each in output.outputs):
        raise ApiError(
            504,
            "the time that the request was given (X-Request-Timeout, or the server's limit) was up before its first "
            "token; give it more, or try again when fewer requests wait",
            code="deadline_exceeded",
        )


def grown(output: RequestOutput, ended: set[int]) -> list[CompletionOutput]:
    """The completions of a delta that have something to tell; `ended` keeps those that have told their end."""
    news = [
        each
        for each in output.outputs
        if each.index not in ended and (each.token_ids or each.text or each.finish_reason is not None)
    ]
    ended.update(each.index for each in news if each.finish_reason is not None)
    return news
