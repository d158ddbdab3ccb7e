"""Which Quire this is."""

from __future__ import annotations

from importlib import metadata


def installed_version() -> str:
    """Return the version of the installed distribution."""
    try:
        return metadata.version("quire")
    except metadata.PackageNotFoundError:
        return "unknown (not installed)"
