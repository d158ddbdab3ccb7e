"""How functions become commands."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import typer

from quire.frontend.cli.flags import SAMPLING_NOTE
from quire.frontend.cli.several import SeveralValues


def add_command(app: typer.Typer, command: Callable[..., object]) -> None:
    """Make a function a command of that name; its docstring is the help."""
    app.command(help=_paragraphs(command.__doc__ or ""), epilog=_epilog(command), cls=SeveralValues)(command)


def _paragraphs(docstring: str) -> str:
    """Join the lines of each paragraph, so that help is wrapped to the terminal's width."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in docstring.split("\n\n"))


def _epilog(command: Callable[..., object]) -> str | None:
    return SAMPLING_NOTE if "temperature" in inspect.signature(command).parameters else None
