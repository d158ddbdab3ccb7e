"""Names of tensors: those that adapters have for the tensors of a base model."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from quire.kernels.errors import ModelError
from quire.kernels.weights.checkpoint import stored_names


class BaseNames:
    """The names of a base model's tensors, found by any name that a checkpoint may have for them.

    Adapters are trained on models whose tensors have other prefixes: `model.language_model.layers.0` of a multimodal
    model, or `layers.0` of one without a head, is `model.layers.0` here, and `model.layers.0` of a Nemotron-H in
    `transformers` is `backbone.layers.0`.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._own = set(names)
        self._others: dict[str, str] = {}
        self._more: dict[str, list[str]] = {}  # apart, so that the names of many experts do not take a list each
        for name in self._own:
            for other in dict.fromkeys([*stored_names(name), *_renamed(name)]):
                if self._others.setdefault(other, name) is not name:
                    self._more.setdefault(other, []).append(name)

    def find(self, path: Path, name: str) -> str | None:
        """Return the base's name, None if it has no such tensor. Raises ModelError if it may be one of several."""
        if name in self._own:
            return name
        found = self._others.get(name)
        if found is not None and name in self._more:
            found_all = [found, *self._more[name]]
            raise ModelError(
                f"{path}: {name} may be any of {', '.join(sorted(found_all)[:3])} in the base model; give the modules "
                "of the adapter the names that the base model's tensors have"
            )
        return found


def _renamed(name: str) -> list[str]:
    """Return the name that `transformers` has for a tensor of another name in checkpoints."""
    if not name.startswith("backbone."):
        return []
    return [name.replace("backbone.", "model.", 1).replace(".embeddings.", ".embed_tokens.")]
