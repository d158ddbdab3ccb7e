"""A Ray Serve application: HTTP ingresses, and replicas of the engine. It needs the extra `ray`.

`serve run quire.frontend.ray:app` serves the demo model; `quire.frontend.ray:build` takes arguments.
"""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    if name in ("app", "build"):
        from quire.frontend.ray import application

        return getattr(application, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
