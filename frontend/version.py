"""The version of Quire."""

from __future__ import annotations


def installed_version() -> str:
    """Return the version of the installed distribution."""
    from importlib import metadata

    try:
        return metadata.version("quire")
    except metadata.PackageNotFoundError:
        return "unknown (not installed)"
