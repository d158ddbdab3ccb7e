"""Typed reading of a checkpoint's config.json, with errors that name the field."""

from __future__ import annotations

from typing import Any, TypeVar

from quire.kernels.errors import ModelError

_LARGEST_SIZE = 2**24
_LARGEST_NUMBER = 1e30
_LARGEST = {"num_hidden_layers": 1000, "n_layer": 1000}
# Heads, experts or streams of a layer, and of all layers: a graph may have an object for each.
_MOST_PARTS = 4096, 2**17
_PARTS = {
    "num_attention_heads", "num_key_value_heads", "num_global_key_value_heads", "n_head",
    "linear_num_key_heads", "linear_num_value_heads", "mamba_n_heads", "mamba_num_heads", "mamba_n_groups", "n_groups",
    "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "altup_num_inputs",
}  # fmt: skip

T = TypeVar("T", int, float, str, bool)


class ModelConfig:
    """Typed access to the fields of config.json, or of the object at `path` in it (`rope_scaling.`)."""

    def __init__(self, fields: dict[str, Any], path: str = "") -> None:
        self.fields = fields
        self.path = path

    @property
    def architecture(self) -> str:
        """First entry of `architectures`."""
        names = self.fields.get("architectures")
        if not isinstance(names, list) or not names or not isinstance(names[0], str):
            raise ModelError(f"config.json: architectures is {names!r}; it must name the model's class")
        return names[0]

    def _typed(self, name: str, value: Any, kind: type[T]) -> T:
        given = type(value)
        if kind is float and given is int:
            value, given = float(value), float
        if given is not kind or not isinstance(value, kind):
            raise ModelError(f"config.json: {self.path}{name} is {value!r}; it must be of type {kind.__name__}")
        typed: T = value
        return typed

    def require(self, name: str, kind: type[T]) -> T:
        """Return the field `name`. Raises ModelError if it is missing or of another type."""
        if self.fields.get(name) is None:
            raise ModelError(f"config.json lacks {self.path}{name}, which {self.architecture} needs")
        return self._typed(name, self.fields[name], kind)

    def get(self, name: str, default: T) -> T:
        """Return the field `name`, or `default` if it is missing or null."""
        value = self.fields.get(name)
        return default if value is None else self._typed(name, value, type(default))

    def size(self, name: str, default: int | None = None) -> int:
        """Return the field `name`, an integer from 1 to a limit that no real model exceeds."""
        value = self.require(name, int) if default is None else self.get(name, default)
        if not 1 <= value <= self._largest(name):
            raise ModelError(f"config.json: {self.path}{name} is {value}; it must be from 1 to {self._largest(name)}")
        return value

    def _largest(self, name: str) -> int:
        """Return the limit of the field `name`, for parts of layers by `num_hidden_layers`."""
        if name not in _PARTS:
            return _LARGEST.get(name, _LARGEST_SIZE)
        of_layer, of_all = _MOST_PARTS
        return min(of_layer, of_all // self.size("num_hidden_layers", 1))

    def positive(self, name: str, default: float | None = None) -> float:
        """Return the field `name`, a finite number above 0."""
        value = self.require(name, float) if default is None else self.get(name, default)
        if not 0 < value <= _LARGEST_NUMBER:
            raise ModelError(f"config.json: {self.path}{name} is {value}; it must be above 0, and finite")
        return value

    def with_defaults(self, **defaults: float) -> ModelConfig:
        """Return the fields with the architecture's defaults for those that config.json omits."""
        return ModelConfig({**defaults, **self.fields}, self.path)

    def options(self, name: str) -> dict[str, Any]:
        """Return the field `name`, an object; empty if it is missing or null."""
        value = self.fields.get(name) or {}
        if not isinstance(value, dict):
            raise ModelError(f"config.json: {self.path}{name} is {value!r}; it must be an object")
        return value

    def section(self, name: str) -> ModelConfig:
        """Return typed access to the object in the field `name`; it is empty if missing or null."""
        return ModelConfig(self.options(name), f"{self.path}{name}.")

    def strings(self, name: str) -> tuple[str, ...]:
        """Return the field `name`, a list of strings; empty if it is missing or null."""
        value = self.fields.get(name) or []
        if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
            raise ModelError(f"config.json: {self.path}{name} is {value!r}; it must be a list of strings")
        return tuple(value)

    def choice(self, name: str, allowed: tuple[T, ...], default: T | None = None) -> T:
        """Return the field `name`, one of `allowed`; without a default it is required."""
        value = self.fields.get(name)
        value = default if value is None else value
        for choice in allowed:
            if type(value) is type(choice) and value == choice:
                return choice
        choices = ", ".join(repr(a) for a in allowed)
        raise ModelError(f"config.json: {self.path}{name} is {value!r}; it must be one of {choices}")

    def restrict(self, name: str, allowed: tuple[Any, ...] = ()) -> None:
        """Raise ModelError if the field is set to a value other than those `allowed`."""
        value = self.fields.get(name)
        if value is not None and value not in allowed:
            choices = "one of " + ", ".join(repr(a) for a in allowed) if allowed else "null"
            raise ModelError(
                f"config.json: {self.path}{name} is {value!r}, which is not supported; it must be {choices}"
            )
