"""The progress bars of a batch, of a download, and of work that goes task by task."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rich.table import Column

_WIDE = 80  # columns of a terminal, from which on there is room for rates
_VERY_WIDE = 100  # from which on there is room for the time so far
_DOWNLOAD_COLUMNS = 40  # of the bar of a download besides its name


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

    console = Console(stderr=True)
    columns: list[progress.ProgressColumn] = [
        progress.TextColumn("Processed prompts", table_column=_one_line()),
        progress.BarColumn(None),
        progress.MofNCompleteColumn(table_column=_one_line()),
        progress.TimeRemainingColumn(table_column=_one_line()),
    ]
    if console.width >= _WIDE:
        rates = "in {task.fields[input]:,.0f} tok/s, out {task.fields[output]:,.0f} tok/s"
        columns.append(progress.TextColumn(rates, table_column=_one_line()))
    if console.width >= _VERY_WIDE:
        columns.insert(3, progress.TimeElapsedColumn(table_column=_one_line()))
    with progress.Progress(*columns, console=console) as bar:
        task = bar.add_task("", total=total, input=0.0, output=0.0)
        counted = [0, 0]

        def advance(prompt_tokens: int, output_tokens: int) -> None:
            counted[0] += prompt_tokens
            counted[1] += output_tokens
            seconds = bar.tasks[0].elapsed or 1e-9
            bar.update(task, advance=1, input=counted[0] / seconds, output=counted[1] / seconds)

        yield advance


@contextmanager
def download_bar(name: str, details: str, num_bytes: int) -> Iterator[Callable[[int], None]]:
    """Show a bar on stderr for a download, or a line where it begins and ends if stderr is not a terminal.

    The callback takes the number of bytes that have arrived, on any thread.
    """
    if sys.stderr is None or not sys.stderr.isatty():
        from rich.filesize import decimal

        began = time.monotonic()
        report(f"downloading {name} ({details}), {decimal(num_bytes)}")
        yield lambda _num_bytes: None
        report(f"downloaded {name} in {time.monotonic() - began:.1f} s")
        return
    from rich import progress
    from rich.console import Console

    console = Console(stderr=True)
    columns: list[progress.ProgressColumn] = [
        progress.TextColumn("{task.description}", markup=False, table_column=_one_line()),
        progress.BarColumn(None),
        progress.DownloadColumn(table_column=_one_line()),
        progress.TimeRemainingColumn(table_column=_one_line()),
    ]
    if console.width >= _WIDE:
        columns.insert(3, progress.TransferSpeedColumn(table_column=_one_line()))
    description = f"Downloading {name}"
    if (room := max(console.width - _DOWNLOAD_COLUMNS, 1)) < len(description):
        description = f"{description[: room - 1]}\u2026"
    with progress.Progress(*columns, console=console) as bar:
        task = bar.add_task(description, total=num_bytes)
        yield lambda num_bytes: bar.advance(task, num_bytes)


@contextmanager
def task_bar() -> Iterator[Callable[[str, int, int], None]]:
    """Show a bar on stderr for each task, or a line where it begins if stderr is not a terminal.

    The callback takes the name of a task, and how much of how much is done.
    """
    begun: set[str] = set()
    if sys.stderr is None or not sys.stderr.isatty():

        def tell(task: str, _done: int, _total: int) -> None:
            if task not in begun:
                begun.add(task)
                report(task)

        yield tell
        return
    from rich import progress
    from rich.console import Console

    columns: list[progress.ProgressColumn] = [
        progress.TextColumn("{task.description}", markup=False, table_column=_one_line()),
        progress.BarColumn(None),
        progress.TaskProgressColumn(table_column=_one_line()),
        progress.TimeRemainingColumn(table_column=_one_line()),
    ]
    with progress.Progress(*columns, console=Console(stderr=True)) as bar:
        tasks: dict[str, progress.TaskID] = {}

        def advance(task: str, done: int, total: int) -> None:
            if task not in tasks:
                tasks[task] = bar.add_task(task)
            bar.update(tasks[task], completed=done, total=total)

        yield advance


def _one_line() -> Column:
    """Return a column that is cut where there is no room: a row that wraps would leave lines behind at each update."""
    from rich.table import Column

    return Column(no_wrap=True, overflow="ellipsis")


def report(message: str) -> None:
    """Write a line about what happens before there is a model to stderr."""
    if sys.stderr is not None:
        sys.stderr.write(f"quire: {message}\n")
        sys.stderr.flush()
