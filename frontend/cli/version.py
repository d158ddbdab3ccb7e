"""`quire version`."""

from __future__ import annotations

import platform

import typer


def version() -> None:
    """Print the version of Quire and of Python."""
    typer.echo(f"quire {installed_version()} (Python {platform.python_version()}, {platform.machine()})")


def installed_version() -> str:
    """Return the version of the installed distribution."""
    from importlib import metadata

    try:
        return metadata.version("quire")
    except metadata.PackageNotFoundError:
        return "unknown (not installed)"


def show(value: bool) -> None:
    """Carry out `quire --version`."""
    if value:
        version()
        raise typer.Exit
