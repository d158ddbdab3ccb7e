"""What a run shows while it goes on."""

from __future__ import annotations

import asyncio
import statistics
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

from quire.frontend.replay.record import Outcome, RequestRecord
from quire.frontend.replay.runner import Replay

_LIVE_SECONDS = 0.25
_PLAIN_SECONDS = 10.0
_RECENT_SECONDS = 10.0


@asynccontextmanager
async def shown(replay: Replay) -> AsyncIterator[None]:
    """Tell on stderr how the run fares: by one line that changes on a terminal, else by a line every ten seconds."""
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.live import Live
        from rich.text import Text

        with Live(console=Console(stderr=True), auto_refresh=False, transient=True) as live:

            def show() -> None:
                live.update(Text(progress_line(replay), no_wrap=True, overflow="ellipsis"), refresh=True)

            async with _repeated(show, _LIVE_SECONDS):
                yield
    else:
        async with _repeated(lambda: print(progress_line(replay), file=sys.stderr, flush=True), _PLAIN_SECONDS):
            yield


def progress_line(replay: Replay) -> str:
    """How many requests are where, and the medians of what has been felt in the last seconds."""
    if not replay.has_begun:
        return "warming up"
    now = replay.clock.now()
    ended = replay.outcomes.total()
    bad = [f"{replay.outcomes[kind]} {kind}" for kind in _BAD if replay.outcomes[kind]]
    parts = [f"{now:.0f} s: {replay.num_sent} sent", f"{len(replay.open)} under way", f"{ended} ended", *bad]
    records = [*replay.open.values(), *replay.recent]
    felt = {
        "TTFT": [each.ttft for each in records if each.ttft is not None and _is_recent(each, now)],
        "ITL": [each.gaps[-1] for each in records if each.gaps and _is_recent(each, now)],
        "lag": [each.lag for each in records if now - each.sent < _RECENT_SECONDS],
    }
    parts += [f"{name} {1000 * statistics.median(values):.1f} ms" for name, values in felt.items() if values]
    return ", ".join(parts)


_BAD = (Outcome.FAILED, Outcome.REFUSED, Outcome.LATE)


def _is_recent(record: RequestRecord, now: float) -> bool:
    return record.last_token is not None and now - record.last_token < _RECENT_SECONDS


@asynccontextmanager
async def _repeated(show: Callable[[], object], seconds: float) -> AsyncIterator[None]:
    async def repeat() -> None:
        while True:
            await asyncio.sleep(seconds)
            show()

    task = asyncio.create_task(repeat())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
