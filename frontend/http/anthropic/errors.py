"""Refusals in Anthropic's shape."""

from __future__ import annotations

import msgspec

from quire.frontend.http.errors import ApiError

_PATH = "/v1/messages"
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def is_anthropic(path: str) -> bool:
    """Whether a path, below the root path, is of Anthropic's API."""
    return path == _PATH or path.startswith(f"{_PATH}/")


class AnthropicErrorDetails(msgspec.Struct):
    """What is wrong, for programs and in words."""

    type: str
    message: str


class AnthropicErrorAnswer(msgspec.Struct, tag_field="type", tag="error"):
    """An error as Anthropic has it."""

    error: AnthropicErrorDetails
    request_id: str


def error_body(error: ApiError, request_id: str) -> AnthropicErrorAnswer:
    """What is sent, as JSON or as an event of a stream that has begun."""
    kind = _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return AnthropicErrorAnswer(AnthropicErrorDetails(kind, error.message), request_id)
