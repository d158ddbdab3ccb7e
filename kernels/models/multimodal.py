"""Multimodal checkpoints, of which only the text part is loaded."""

from __future__ import annotations

from quire.kernels.config import ModelConfig

_TEXT = "text_config"


def has_other_parts(config: ModelConfig) -> bool:
    """Return True if the model takes more than text."""
    return isinstance(config.fields.get(_TEXT), dict)


def text_part(config: ModelConfig) -> ModelConfig:
    """Return the configuration of the text part. Raises ModelError."""
    outer = {name: config.fields.get(name) for name in ("architectures", "tie_word_embeddings")}
    given = {name: value for name, value in outer.items() if value is not None}
    return ModelConfig({**config.options(_TEXT), **given}, f"{_TEXT}.")
