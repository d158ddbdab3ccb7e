"""Outputs of the prompts of one body: merged into one stream, or each run to its end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Iterable, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from quire.frontend.http.errors import ApiError, errors_at
from quire.frontend.outputs import CompletionOutput, RequestOutput
from quire.frontend.sampling import SamplingParams, check_length
from quire.frontend.text.prompts import Prompt, PromptType
from quire.frontend.turns import in_turns

T = TypeVar("T")

_AT_ONCE = 256  # requests of one body

Outputs = AsyncGenerator[RequestOutput, None]


def check_lengths(prompts: Sequence[PromptType], params: SamplingParams, max_model_len: int, field: str) -> None:
    """Raise `ApiError` 400 that names the one of several prompts in `field` that leaves no room for an answer."""
    if len(prompts) == 1:
        return  # checked where its request is made
    for index, prompt in enumerate(prompts):
        if isinstance(prompt, Prompt):
            with errors_at(field, index):
                check_length(params, len(prompt.token_ids), max_model_len)


async def last_of(outputs: Outputs) -> RequestOutput:
    """Return the last output of a stream that is not of deltas, which holds everything."""
    last: RequestOutput | None = None
    async with aclosing(outputs):
        async for output in outputs:
            last = output
    assert last is not None  # a stream ends with a finished output, or raises
    check_deadline(last)
    return last


async def all_of(streams: Sequence[Outputs]) -> list[RequestOutput]:
    """Return the last output of each stream; if one fails, abort the others and raise its error."""
    if len(streams) == 1:
        return [await last_of(streams[0])]
    return await results_of(map(last_of, streams))


async def results_of(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Return the results of coroutines, of which `_AT_ONCE` run at once; if one fails, cancel the others.

    The others wait here, so that one body leaves room for those of others in the engine's queue.
    """
    tasks: list[asyncio.Task[T]] = []
    room, failures = asyncio.Semaphore(_AT_ONCE), asyncio.Event()

    def end(task: asyncio.Task[T]) -> None:
        if task.cancelled() or task.exception() is not None:
            failures.set()
        room.release()

    try:
        async for each in in_turns(work):
            tasks.append(asyncio.create_task(each))
            tasks[-1].add_done_callback(end)
            await room.acquire()
            if failures.is_set():
                break
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)  # `gather` would cancel all at once
        return list(map(asyncio.Task.result, filter(asyncio.Task.done, tasks)))  # or raise an error of theirs
    finally:
        await _cancel(tasks)
        tasks.clear()  # else an error would keep them: its traceback refers to this frame


async def _cancel(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Cancel tasks, and wait for their end; each of them has a request to abort."""
    open_tasks = [task for task in tasks if not task.done()]
    try:
        async for task in in_turns(open_tasks):
            task.cancel()
    finally:
        for task in open_tasks:
            if not task.cancelling():  # since this was cancelled itself
                task.cancel()
        if tasks:
            await asyncio.wait(tasks)


async def merged(streams: Sequence[Outputs]) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """Yield the outputs of all streams as they arrive, each with the index of its stream."""
    if len(streams) == 1:
        async with aclosing(streams[0]) as outputs:
            async for output in outputs:
                yield 0, output
        return
    room = asyncio.Semaphore(len(streams))  # backpressure: a slow consumer pauses the streams
    queue: asyncio.Queue[tuple[int, RequestOutput] | None] = asyncio.Queue()

    async def forward(index: int, outputs: Outputs) -> None:
        async with aclosing(outputs):
            async for output in outputs:
                await room.acquire()
                queue.put_nowait((index, output))

    work = asyncio.create_task(results_of(forward(index, stream) for index, stream in enumerate(streams)))
    work.add_done_callback(lambda _: queue.put_nowait(None))
    try:
        while (item := await queue.get()) is not None:
            room.release()
            yield item
        await work
    finally:
        await _cancel([work])
        if not work.cancelled():
            work.exception()  # it has been raised above
        del work  # else its error would keep it: see results_of


def check_deadline(output: RequestOutput) -> None:
    """Raise `ApiError` 504 if the request's time was up before its first token."""
    if all(each.finish_reason == "timeout" and not each.token_ids for each in output.outputs):
        raise ApiError(
            504,
            "the request's time limit (X-Request-Timeout, or the server's) was up before its first token; allow more "
            "time, or try again when fewer requests are waiting",
            code="deadline_exceeded",
        )


def grown(output: RequestOutput, ended: set[int]) -> list[CompletionOutput]:
    """Return the completions of a delta that have grown or ended; `ended` accumulates the indices of ended ones."""
    changed = [
        each
        for each in output.outputs
        if each.index not in ended and (each.token_ids or each.text or each.finish_reason is not None)
    ]
    ended.update(each.index for each in changed if each.finish_reason is not None)
    return changed
