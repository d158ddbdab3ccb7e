"""Multimodal checkpoints, of which only the text part is loaded."""

from __future__ import annotations

from collections.abc import Callable

from quire.kernels.config import ModelConfig
from quire.kernels.graph.operations import Graph

_TEXT = "text_config"


def has_other_parts(config: ModelConfig) -> bool:
    """Return True if the model takes more than text."""
    return isinstance(config.fields.get(_TEXT), dict)


def text_part(config: ModelConfig) -> ModelConfig:
    """Return the configuration of the text part. Raises ModelError."""
    outer = {name: config.fields.get(name) for name in ("architectures", "tie_word_embeddings")}
    given = {name: value for name, value in outer.items() if value is not None}
    return ModelConfig({**config.options(_TEXT), **given}, f"{_TEXT}.")


def of_text_part(build: Callable[[ModelConfig], Graph]) -> Callable[[ModelConfig], Graph]:
    """Return a builder that gives `build` the configuration of the text part, where there are others."""
    return lambda config: build(text_part(config) if has_other_parts(config) else config)
