"""What schemathesis does with the requests that it makes up, see `frontend/http/documentation/schemathesis.toml`."""

from __future__ import annotations

from typing import Any

import schemathesis

TIMEOUT = "X-Request-Timeout"


@schemathesis.hook
def before_call(_context: Any, case: Any, _kwargs: Any) -> None:
    """Give a minute for each time that is one: a millionth of a second is up before the first token, rightly so."""
    try:
        seconds = float((case.headers or {}).get(TIMEOUT, "nan"))
    except ValueError:
        return
    if 0 < seconds < 1e9:
        case.headers[TIMEOUT] = "60"
