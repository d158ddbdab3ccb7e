"""Body fields that several APIs share, and their checks."""

from __future__ import annotations

from typing import Any

from msgspec import Meta

from quire.frontend.http.errors import bad_request
from quire.frontend.http.transport.bodies import Refusals
from quire.protocol.messages import StructuredOutputs

STRUCTURED_OUTPUTS = "structured_outputs"
RESPONSE_FORMAT = "response_format"

NOT_HERE = "this server does not have it"
TOOL_REFUSED: Refusals = {  # keys of a tool
    "allowed_callers": ((["direct"],), "no code is run here"),
    "defer_loading": ((False,), "the model is shown all tools"),
}

_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")

EFFORT = Meta(extra_json_schema={"enum": list(_EFFORTS)})


def effort_kwargs(effort: str | None, field: str) -> dict[str, Any]:
    """Return the chat template's variables for a reasoning effort; some templates can only turn thinking off.

    Raises `ApiError` 400 for an unknown effort; `field` is the field that gave it.
    """
    if effort is None:
        return {}
    if effort not in _EFFORTS:
        raise bad_request(f"{field}={effort!r} is not known; it can be {', '.join(_EFFORTS)}", field, "invalid_value")
    return {"reasoning_effort": effort, **({"enable_thinking": False} if effort == "none" else {})}


def only_one(
    structured: StructuredOutputs | None, wanted: StructuredOutputs | None, field: str = RESPONSE_FORMAT
) -> StructuredOutputs | None:
    """Return the one that is given: `structured_outputs`, or `wanted` from `field`. Raises `ApiError` 400 for both."""
    if structured is not None and wanted is not None:
        raise bad_request(f"{field} and structured_outputs both constrain the answer; give only one of them", field)
    return wanted if structured is None else structured
