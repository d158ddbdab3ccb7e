"""Progress display of a run."""

from __future__ import annotations

import asyncio
import statistics
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import TYPE_CHECKING

from quire.frontend.evaluation.replay.record import Outcome, RequestRecord
from quire.frontend.evaluation.replay.runner import Replay

if TYPE_CHECKING:
    from rich.console import Console

_BAR_WIDTH = 20
_LIVE_SECONDS = 0.25
_PLAIN_SECONDS = 10.0
_RECENT_SECONDS = 10.0


@asynccontextmanager
async def shown(replay: Replay) -> AsyncIterator[None]:
    """Show progress on stderr: a bar on a terminal, else a line every ten seconds."""
    if sys.stderr.isatty():
        from rich.console import Console

        with bar(replay, Console(stderr=True)) as show:
            async with _repeated(show, _LIVE_SECONDS):
                yield
    else:
        async with _repeated(lambda: print(_plain_line(replay), file=sys.stderr, flush=True), _PLAIN_SECONDS):
            yield


@contextmanager
def bar(replay: Replay, console: Console) -> Iterator[Callable[[], None]]:
    """Yield a function that shows a progress bar, the time left, and the line.

    The bar pulses if the length of the workload is unknown.
    """
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
    from rich.table import Column

    line = TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis"))
    columns = (BarColumn(_BAR_WIDTH), TimeRemainingColumn(compact=True), line)
    with Progress(*columns, console=console, auto_refresh=False, transient=True) as progress:
        task = progress.add_task("", total=None)

        def show() -> None:
            share = replay.share
            total = None if share is None else 1.0
            progress.update(task, total=total, completed=share or 0.0, description=progress_line(replay), refresh=True)

        yield show


def _plain_line(replay: Replay) -> str:
    share = replay.share
    return progress_line(replay) if share is None else f"{share:.0%} after {progress_line(replay)}"


def progress_line(replay: Replay) -> str:
    """Return counts of requests, and the median latency of the last seconds."""
    if not replay.has_begun:
        return "warming up"
    now = replay.clock.now()
    ended = replay.outcomes.total()
    bad = [f"{replay.outcomes[kind]} {kind}" for kind in _BAD if replay.outcomes[kind]]
    parts = [f"{now:.0f} s: {replay.num_sent} sent", f"{len(replay.open)} in flight", f"{ended} ended", *bad]
    records = [*replay.open.values(), *replay.recent]
    latencies = {
        "TTFT": [each.ttft for each in records if each.ttft is not None and _is_recent(each, now)],
        "gap": [each.gaps[-1] for each in records if each.gaps and _is_recent(each, now)],
        "lag": [each.lag for each in records if now - each.sent < _RECENT_SECONDS],
    }
    parts += [f"{name} {1000 * statistics.median(values):.1f} ms" for name, values in latencies.items() if values]
    return ", ".join(parts)


_BAD = (Outcome.ERRORED, Outcome.REFUSED, Outcome.LATE)


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
