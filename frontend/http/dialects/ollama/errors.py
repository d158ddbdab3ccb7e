"""Errors in the shape of Ollama's API."""

from __future__ import annotations

import msgspec

from quire.frontend.http.errors import ApiError


class OllamaErrorResponse(msgspec.Struct):
    """An error in Ollama's shape."""

    error: str


def ollama_error(error: ApiError, _request_id: str) -> OllamaErrorResponse:
    """Return the JSON body."""
    return OllamaErrorResponse(error.message)
