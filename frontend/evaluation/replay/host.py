"""The host of a measurement."""

from __future__ import annotations

import platform


def processor() -> str:
    """Return the name of the CPU, or else its architecture."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:  # noqa: PTH123 - the file has no size
            names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
            return next(names, platform.machine())
    except OSError:
        return platform.machine()
