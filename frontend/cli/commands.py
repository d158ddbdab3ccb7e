"""Commands: functions made into subcommands, and flags that take several values, as `--goodput ttft:200 tpot:50`."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import typer
from typer.core import TyperCommand

from quire.frontend.cli.flags import SAMPLING_NOTE

# Flags with the pattern of a further value, since other arguments may follow.
_SEVERAL = {"--goodput": re.compile(r"\w+:[\d.]+"), "--compare": re.compile(r"[^-].*\.json")}


class SeveralValues(TyperCommand):
    """A command in which some flags take all values that follow, and may also be given several times."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Give each value a flag of its own, as the parser requires."""
        return super().parse_args(ctx, list(spread(args)))


def spread(arguments: Iterable[str]) -> Iterator[str]:
    """Yield the arguments, with a flag before each of its values."""
    flag, is_first = None, False
    for argument in arguments:
        if argument in _SEVERAL:
            flag, is_first = argument, True
        elif is_first:
            is_first = False
        elif flag is not None and _SEVERAL[flag].fullmatch(argument):
            yield flag
        else:
            flag = None
        yield argument


def add_command(app: typer.Typer, command: Callable[..., object]) -> None:
    """Add a function as a command of the same name; its docstring is the help."""
    app.command(help=_paragraphs(command.__doc__ or ""), epilog=_epilog(command), cls=SeveralValues)(command)


def _paragraphs(docstring: str) -> str:
    """Join the lines of each paragraph, so that help wraps at the terminal's width."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in docstring.split("\n\n"))


def _epilog(command: Callable[..., object]) -> str | None:
    return SAMPLING_NOTE if "temperature" in inspect.signature(command).parameters else None
