"""The names of models in Ollama's API, whose answers repeat them."""

from __future__ import annotations

from quire.frontend.http.service import ModelService


def answered_name(service: ModelService, name: str | None) -> str:
    """Return the name for the answer: the client's, or the model's."""
    return service.name if name is None else name
