"""Kind, size and identity of a model, as Ollama's API shows them."""

from __future__ import annotations

import hashlib
import re
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import msgspec

from quire.frontend.http.models.served_model import ServedModel
from quire.frontend.text.tokenizer_files import read_json

_WEIGHTS = ("*.safetensors", "*.gguf")


class ModelDetails(msgspec.Struct, kw_only=True):
    """Kind and size of the model; the size is empty if the weights are no GGUF file, or on another machine."""

    parent_model: str = ""
    format: str
    family: str
    families: list[str]
    parameter_size: str = ""
    quantization_level: str = ""


class DescribedModel:
    """Kind, size and identity of a model, from its files and from what is known since it was loaded."""

    def __init__(self, model: ServedModel) -> None:
        self.facts = model.facts
        self._model = model
        self._folder = Path(model.path if self.facts is None else self.facts.root)

    @classmethod
    def read(cls, model: ServedModel) -> Self:
        """Return a model as its files describe it, which are read now; not on the event loop."""
        made = cls(model)
        _ = made.details, made.digest
        return made

    @cached_property
    def details(self) -> ModelDetails:
        """Kind and size of the model."""
        is_gguf = bool(self._description) or self._folder.is_file()
        return ModelDetails(
            format="gguf" if is_gguf else "safetensors",
            family=self._family,
            families=[self._family],
            parameter_size=_short_count(self._description.get("num_parameters", 0)),
            quantization_level=self._description.get("file_type", ""),
        )

    @cached_property
    def size(self) -> int:
        """Bytes of the files of weights, 0 if they are on another machine."""
        place = self._folder
        files = [place] if place.is_file() else [file for kind in _WEIGHTS for file in place.glob(kind)]
        return sum(file.stat().st_size for file in files if file.is_file())

    @cached_property
    def digest(self) -> str:
        """Hash of what tells the model from others."""
        facts = self.facts
        known = [self._model.path] if facts is None else [facts.root, facts.info.architecture, facts.info.text_files]
        return hashlib.sha256("\0".join([*known, str(self.size)]).encode()).hexdigest()

    def info(self) -> dict[str, Any]:
        """Return the fields of a GGUF file's metadata that are known."""
        facts, family = self.facts, self._family
        count = self._description.get("num_parameters")
        known = {} if facts is None else {
            f"{family}.context_length": facts.info.max_model_len,
            f"{family}.embedding_length": facts.info.hidden_size,
            f"{family}.vocab_size": facts.info.vocab_size,
        }  # fmt: skip
        return {
            "general.architecture": family,
            "general.basename": self._model.name,
            **({} if count is None else {"general.parameter_count": count}),
            **known,
        }

    @cached_property
    def _family(self) -> str:
        facts = self.facts
        if facts is not None:
            return _family(facts.info.architecture)
        architectures = self._read("config.json").get("architectures")
        return _family(str(architectures[0])) if isinstance(architectures, list) and architectures else ""

    @cached_property
    def _description(self) -> dict[str, Any]:
        """The description of a GGUF file (`kernels/gguf/description.py`), empty for other models."""
        return self._read("gguf.json")

    def _read(self, name: str) -> dict[str, Any]:
        """Return the JSON object in a file of the folder; an empty one if it cannot be read, which loading explains."""
        with suppress(ValueError):
            return read_json(self._folder, name)
        return {}


def _family(architecture: str) -> str:
    """Return the family of an architecture: `qwen3` for `Qwen3ForCausalLM`."""
    return re.sub(r"(For\w+|Model)$", "", architecture).lower()


def _short_count(count: int) -> str:
    """Return a number of parameters as Ollama writes it, 134.52M or 3.2B; nothing for 0."""
    for size, letter, digits in ((10**9, "B", 1), (10**6, "M", 2), (10**3, "K", 2)):
        if count >= size:
            return f"{count / size:.{digits}f}".rstrip("0").rstrip(".") + letter
    return str(count or "")
