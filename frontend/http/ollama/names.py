"""The names of the served model as Ollama's clients write them: with a tag, which is `latest` if they leave it out."""

from __future__ import annotations

from quire.frontend.http.errors import ApiError
from quire.frontend.http.service import ModelService

_LATEST = ":latest"
_MOST_SHOWN = 200  # characters of an unknown name in its error


def with_tag(name: str) -> str:
    """Return a name with its tag."""
    return name if ":" in name.rpartition("/")[2] else name + _LATEST


def check_model(service: ModelService, name: str | None) -> str:
    """Return the name for the answer: the client's, or the model's. Raises `ApiError` 404 for another model's."""
    if name is None:
        return service.name
    if with_tag(name) in map(with_tag, service.names):
        return name
    known = ", ".join(service.public_names)
    raise ApiError(
        404,
        f'model "{name[:_MOST_SHOWN]}" not found, this server has {known}; start one for another: quire serve MODEL',
        code="model_not_found",
        param="model",
    )
