"""Multimodal checkpoints, of which only the text part is loaded."""

from __future__ import annotations

import logging

from quire.kernels.config import ModelConfig

logger = logging.getLogger(__name__)


def text_part(config: ModelConfig) -> ModelConfig:
    """Return the configuration of the text part, and say that the others are not loaded. Raises ModelError."""
    logger.warning("%s: only the text part is loaded; images, audio and video are not supported", config.architecture)
    outer = {name: config.fields.get(name) for name in ("architectures", "tie_word_embeddings")}
    given = {name: value for name, value in outer.items() if value is not None}
    return ModelConfig({**config.options("text_config"), **given}, "text_config.")
