"""Typed access to the metadata and the tensors of a GGUF file, with errors that name the key.

It notes the keys of the architecture that were read: one that nothing reads may change the model, so it is an error.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from quire.kernels.errors import ModelError
from quire.kernels.gguf.container import GgufTensor

FLOAT_TYPES = ("F32", "F16", "BF16")
_LARGEST = 1 << 31
_MEANINGLESS = ("vocab_size", "rope.scaling.finetuned", "tensor_data_layout")
"""Keys that change nothing: the embedding has the size of the vocabulary."""


def shortest_decimal(value: float) -> float:
    """Return the shortest decimal that is the same in f32, if the value is one of f32: 1e-05, as JSON would have it."""
    if abs(value) > float(np.finfo(np.float32).max):
        return value
    short = np.float32(value)
    return float(str(short)) if float(short) == value else value


class Metadata:
    """The metadata of a file, and its `tensors` by their names there."""

    def __init__(self, metadata: Mapping[str, Any], tensors: Mapping[str, GgufTensor]) -> None:
        self.tensors = tensors
        self._metadata = metadata
        self._prefix = metadata.get("general.architecture")
        self._read: set[str] = set(_MEANINGLESS)

    @property
    def architecture(self) -> Any:
        """`general.architecture`, of any type."""
        return self._prefix

    def get(self, key: str) -> Any:
        """Return the value of a key that does not belong to the architecture, None if it is missing."""
        return self._metadata.get(key)

    def own(self, name: str) -> Any:
        """Return the value of a key of the architecture, None if it is missing."""
        self._read.add(name)
        return self._metadata.get(f"{self._prefix}.{name}")

    def size(self, name: str, default: int | None = None) -> int:
        """Return a key of the architecture, an integer above 0."""
        value = default if self.own(name) is None else self.own(name)
        if type(value) is not int or not 1 <= value <= _LARGEST:
            raise self.unsupported(name, "it must be an integer above 0, the same for all layers")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """Return a key of the architecture, a number above 0, as `shortest_decimal`."""
        value = default if self.own(name) is None else self.own(name)
        value = float(value) if type(value) is int else value
        if type(value) is not float or not math.isfinite(value) or value <= 0:
            raise self.unsupported(name, "it must be a number above 0")
        return shortest_decimal(value)

    def flag(self, name: str, default: bool) -> bool:
        """Return a key of the architecture, true or false."""
        value = default if self.own(name) is None else self.own(name)
        if type(value) is not bool:
            raise self.unsupported(name, "it must be true or false")
        return value

    def counts(self, name: str, layers: int) -> list[int]:
        """Return a key of the architecture for each of its first `layers` layers: integers from 0 on."""
        value = self.own(name)
        values = value if isinstance(value, list) else [value] * layers
        if len(values) < layers or not all(type(entry) is int and 0 <= entry <= _LARGEST for entry in values):
            raise self.unsupported(name, f"it must be an integer from 0 on, or one for each of {layers} layers")
        return values[:layers]

    def flags(self, name: str, layers: int) -> list[bool]:
        """Return a key of the architecture for each of its first `layers` layers, true or false."""
        values = self.own(name)
        if (
            not isinstance(values, list)
            or len(values) < layers
            or not all(type(entry) is bool for entry in values[:layers])
        ):
            raise self.unsupported(name, f"it must be true or false for each of {layers} layers")
        return values[:layers]

    def has(self, tensor: str) -> bool:
        """Return True if the file has a tensor of this name."""
        return tensor in self.tensors

    def factors(self, tensor: str) -> list[float]:
        """Return a tensor of factors of a rotary embedding, one for each frequency."""
        found = self.tensors[tensor]
        if found.type != "F32" or len(found.shape) != 1:
            raise ModelError(
                f"the GGUF file has {tensor} in type {found.type} and shape {list(found.shape)}; it must be a list of "
                "F32"
            )
        values: list[float] = found.data.view("<f4").tolist()
        return values

    def unsupported(self, name: str, advice: str) -> ModelError:
        """Return an error for a key of the architecture."""
        value = self.own(name)
        given = "lacks" if value is None else f"has {repr(value)[:80]} as"
        return ModelError(f"the GGUF file {given} {self._prefix}.{name}; {advice}")

    def check_all_read(self) -> None:
        """Raise ModelError for a key of the architecture that was not read, unless its value says that it is off."""
        for key, value in self._metadata.items():
            prefix, _, name = key.partition(".")
            if prefix == self._prefix and name not in self._read and value not in (0, [], ""):
                raise self.unsupported(
                    name, f"this key is not supported; supported for {self._prefix} are {', '.join(sorted(self._read))}"
                )
