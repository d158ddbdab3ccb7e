"""The sampling parameters that a model recommends, in its generation_config.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

GENERATION_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def generation_defaults(folder: Path) -> dict[str, Any]:
    """Return the sampling values of generation_config.json; `do_sample: false` there means temperature 0."""
    from quire.frontend.text.tokenizer_files import read_json

    config = read_json(folder, "generation_config.json")
    found = {name: config[name] for name in GENERATION_DEFAULTS if config.get(name) is not None}
    return {**found, "temperature": 0.0} if config.get("do_sample") is False else found


def model_defaults(tokenizer: Path | None, model: str) -> dict[str, Any]:
    """Return the values in the folder of the tokenizer, else in the model's own, as a GGUF file has it."""
    return {} if tokenizer is None else generation_defaults(tokenizer) or generation_defaults(Path(model))
