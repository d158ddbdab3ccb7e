"""Errors in the shape of Anthropic's API."""

from __future__ import annotations

import msgspec

from quire.frontend.http.errors import ApiError

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class AnthropicErrorDetails(msgspec.Struct):
    """The error: its type for programs, a message for people."""

    type: str
    message: str


class AnthropicErrorResponse(msgspec.Struct, tag_field="type", tag="error"):
    """An error in Anthropic's shape."""

    error: AnthropicErrorDetails
    request_id: str


def anthropic_error(error: ApiError, request_id: str) -> AnthropicErrorResponse:
    """Return the JSON body, which is also the data of the event that ends a failed stream."""
    kind = _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return AnthropicErrorResponse(AnthropicErrorDetails(kind, error.message), request_id)
