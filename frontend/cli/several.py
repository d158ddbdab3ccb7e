"""Flags that take several values, as `--goodput ttft:200 tpot:50`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from typer.core import TyperCommand

# The flags, and what a further value of each looks like: other arguments may follow.
_SEVERAL = {"--goodput": re.compile(r"\w+:[\d.]+"), "--compare": re.compile(r"[^-].*\.json")}


class SeveralValues(TyperCommand):
    """A command with flags of which one takes all the values that follow, and may be given several times as well."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Give each value a flag of its own, as the parser wants it."""
        return super().parse_args(ctx, list(spread(args)))


def spread(arguments: Iterable[str]) -> Iterator[str]:
    """The arguments with a flag before each of its values."""
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
