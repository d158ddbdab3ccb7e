"""Hooks for the requests that schemathesis generates; see `tests/frontend/http/documentation/schemathesis.toml`."""

from __future__ import annotations

from typing import Any

import schemathesis

TIMEOUT = "X-Request-Timeout"


@schemathesis.hook
def before_call(_context: Any, case: Any, _kwargs: Any) -> None:
    """Replace each valid time limit by a minute: a microsecond is up before the first token."""
    try:
        seconds = float((case.headers or {}).get(TIMEOUT, "nan"))
    except ValueError:
        return
    if 0 < seconds < 1e9:
        case.headers[TIMEOUT] = "60"
