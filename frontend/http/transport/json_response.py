"""Answers in JSON."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.responses import Response


def json_response(value: Any, status: int = 200) -> Response:
    """A struct, or what is made of them, as the body."""
    return Response(msgspec.json.encode(value), status, media_type="application/json")
