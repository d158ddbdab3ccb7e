"""Names for answers and requests."""

from __future__ import annotations

import re
import secrets
from typing import Annotated

from msgspec import Meta
from starlette.datastructures import Headers

REQUEST_ID = "X-Request-Id"
_GOOD_ID = r"[!-~]{1,128}"

GivenId = Annotated[str, Meta(pattern=rf"^{_GOOD_ID}(?![\s\S])")]
"""A name that a client may choose: one that a line of a log can hold. `$` would let a line break end it."""


def new_id(prefix: str, separator: str = "-", given: str | None = None) -> str:
    """A name such as `cmpl-8f14e45fceea167a5a36dedd4bea2543`: of its client's choice, or one that no other has."""
    return f"{prefix}{separator}{given or secrets.token_hex(16)}"


def request_id_of(headers: Headers) -> str:
    """The client's name for a request, if it is one that a log line can hold; else a new one."""
    given = headers.get(REQUEST_ID, "")
    return given if re.fullmatch(_GOOD_ID, given) else secrets.token_hex(16)
