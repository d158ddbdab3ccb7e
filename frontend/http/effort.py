"""How hard to think, as clients of every API say it."""

from __future__ import annotations

from typing import Any

from msgspec import Meta

from quire.frontend.http.errors import bad_request

_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")

EFFORT = Meta(extra_json_schema={"enum": list(_EFFORTS)})


def effort_variables(effort: str | None, field: str) -> dict[str, Any]:
    """The variables of the chat template that say so; some templates know only whether to think at all.

    Raises `ApiError` 400 for an effort that there is not; `field` is where it stands.
    """
    if effort is None:
        return {}
    if effort not in _EFFORTS:
        raise bad_request(f"{field}={effort!r} is not known; it can be {', '.join(_EFFORTS)}", field, "invalid_value")
    return {"reasoning_effort": effort, **({"enable_thinking": False} if effort == "none" else {})}
