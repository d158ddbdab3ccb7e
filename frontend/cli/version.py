"""`quire version`."""

from __future__ import annotations

import platform

import typer

from quire.frontend.version import installed_version


def version() -> None:
    """Print the version of Quire and of Python."""
    typer.echo(f"quire {installed_version()} (Python {platform.python_version()}, {platform.machine()})")


def show(value: bool) -> None:
    """Carry out `quire --version`."""
    if value:
        version()
        raise typer.Exit
