"""The progress bar of a batch."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class Advance(Protocol):
    """Callback that advances the bar when a request has ended."""

    def __call__(self, prompt_tokens: int, output_tokens: int) -> None:
        """Count one request with its tokens."""


@contextmanager
def progress_bar(total: int, wanted: bool) -> Iterator[Advance]:
    """Show a bar on stderr for `total` requests, with their throughput; nothing if stderr is not a terminal."""
    if not wanted or total < 2 or sys.stderr is None or not sys.stderr.isatty():
        yield lambda prompt_tokens, output_tokens: None
        return
    from rich import progress
    from rich.console import Console

    columns = (
        progress.TextColumn("Processed prompts"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TimeElapsedColumn(),
        progress.TimeRemainingColumn(),
        progress.TextColumn("in {task.fields[input]:,.0f} tok/s, out {task.fields[output]:,.0f} tok/s"),
    )
    with progress.Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=total, input=0.0, output=0.0)
        counted = [0, 0]

        def advance(prompt_tokens: int, output_tokens: int) -> None:
            counted[0] += prompt_tokens
            counted[1] += output_tokens
            seconds = bar.tasks[0].elapsed or 1e-9
            bar.update(task, advance=1, input=counted[0] / seconds, output=counted[1] / seconds)

        yield advance
