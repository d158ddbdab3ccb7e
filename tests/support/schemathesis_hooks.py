"""Hooks for the requests that schemathesis generates, and their answers.

See `tests/frontend/http/documentation/schemathesis.toml`.
"""

from __future__ import annotations

import json
from typing import Any

import schemathesis

TIMEOUT = "X-Request-Timeout"


@schemathesis.deserializer("application/x-ndjson")
def last_line(_context: Any, response: Any) -> Any:
    """Return the last line of a stream of JSON, whose schema is that of each line."""
    return json.loads(response.content.splitlines()[-1])


@schemathesis.hook
def before_call(_context: Any, case: Any, _kwargs: Any) -> None:
    """Replace each valid time limit by a minute: a microsecond is up before the first token."""
    try:
        seconds = float((case.headers or {}).get(TIMEOUT, "nan"))
    except ValueError:
        return
    if 0 < seconds < 1e9:
        case.headers[TIMEOUT] = "60"
