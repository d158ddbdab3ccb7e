"""The names of the served model in Ollama's API, whose answers repeat them and whose errors have words of their own."""

from __future__ import annotations

from quire.frontend.http.errors import ApiError
from quire.frontend.http.service import ModelService

_MOST_SHOWN = 200  # characters of an unknown name in its error


def check_model(service: ModelService, name: str | None) -> str:
    """Return the name for the answer: the client's, or the model's. Raises `ApiError` 404 for another model's."""
    if name is None:
        return service.name
    if service.is_named(name):
        return name
    known = ", ".join(service.public_names)
    raise ApiError(
        404,
        f'model "{name[:_MOST_SHOWN]}" not found, this server has {known}; start one for another: quire serve MODEL',
        code="model_not_found",
        param="model",
    )
