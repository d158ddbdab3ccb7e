"""Recording of an engine's steps while work runs on it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from quire.frontend.async_llm import AsyncLLM
from quire.frontend.errors import EngineDeadError
from quire.frontend.metrics.chrome_trace import ChromeTrace
from quire.protocol.messages import StepTrace

_WATCH_SECONDS = 0.25
_LAST_SECONDS = 30.0  # for the step that runs at the end, and for traces in flight


async def record(
    llm: AsyncLLM, chrome: ChromeTrace, work: Callable[[], Coroutine[Any, Any, None]], seconds: float | None = None
) -> None:
    """Run `work` for at most `seconds`, and write the engine's steps meanwhile; errors of `work` are raised at the end.

    However it ends, also if it is cancelled, traces in flight are written first. Raises OSError if the file cannot be
    written, EngineDeadError if the engine is gone.
    """
    steps: asyncio.Queue[StepTrace] = asyncio.Queue()
    writing = asyncio.create_task(_write(steps, chrome))
    await llm.start_trace(steps.put_nowait)
    working = asyncio.create_task(work())
    try:
        await asyncio.wait((working, writing), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        if not working.done():
            working.cancel()
            await asyncio.wait((working,))
        await _end(llm, steps, writing)
    if not working.cancelled():
        working.result()


async def watch(llm: AsyncLLM) -> None:
    """Wait until the engine is dead, and raise the error."""
    while (error := llm.dead_error) is None:  # noqa: ASYNC110 - a client without requests gets no notice
        await asyncio.sleep(_WATCH_SECONDS)
    raise EngineDeadError(*error.args)


async def _write(steps: asyncio.Queue[StepTrace], chrome: ChromeTrace) -> None:
    is_last = False
    while not is_last:
        step = await steps.get()
        chrome.add(step)
        is_last = step.last


async def _end(llm: AsyncLLM, steps: asyncio.Queue[StepTrace], writing: asyncio.Task[None]) -> None:
    """End the subscription, and with it the writing."""
    try:
        async with asyncio.timeout(_LAST_SECONDS):
            with suppress(EngineDeadError):  # in which case no trace follows
                await llm.stop_trace()
            if llm.dead_error is not None:
                steps.put_nowait(StepTrace(0.0, last=True))
            await writing
    except TimeoutError:
        raise EngineDeadError(
            f"the engine did not end the trace within {_LAST_SECONDS:g} s; its last steps are missing"
        ) from None
