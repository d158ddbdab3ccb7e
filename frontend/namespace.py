"""Quire, an engine that serves language models on CPUs.

This module is installed as `quire/__init__.py`. Names are imported from `quire.frontend` on first use: an engine
process, which imports `quire.engine_core`, needs none of them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quire.frontend import *  # noqa: F403 - the same names
    from quire.frontend import __all__  # noqa: F401

    __version__: str


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return importlib.import_module("quire.frontend.version").installed_version()
    frontend = importlib.import_module("quire.frontend")
    if name == "__all__" or name in frontend.__all__:
        return getattr(frontend, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
