"""The version of Quire."""

from __future__ import annotations

from functools import cache

_COMMAND = "quire = quire.frontend.cli:main"


@cache
def installed_version() -> str:
    """Return the version of the distribution that brings the command `quire`, whatever its own name is."""
    from importlib import metadata

    for distribution in metadata.distributions():
        if _COMMAND in (distribution.read_text("entry_points.txt") or "").splitlines():
            return distribution.version
    return "unknown (not installed)"
