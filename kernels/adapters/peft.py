"""Adapters in the folders that PEFT writes: adapter_config.json, and adapter_model.safetensors.

Tensors are `base_model.model.PATH.lora_A.weight` and so on, where PATH is that of the module in the model that was
trained. Each has a meaning here, or the adapter is rejected: one that is left out would change the results silently.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from quire.kernels.adapters.adapter import Adapter, LowRank, TokenRows
from quire.kernels.adapters.names import BaseNames
from quire.kernels.adapters.peft_config import CONFIG, PeftConfig, read_peft_config
from quire.kernels.adapters.shapes import HEAD
from quire.kernels.adapters.tensors import MOST_NAMED, MOST_TENSORS, checked, is_missing, read_file, scaled
from quire.kernels.errors import ModelError
from quire.kernels.weights.safetensors_file import parse_safetensors
from quire.kernels.weights.tensor import Tensor

_TENSORS, _PICKLE = "adapter_model.safetensors", "adapter_model.bin"
_PREFIX = "base_model.model."

_FORMS = (
    (re.compile(r"(?P<module>.+)\.lora_A(\.default)?\.weight"), "A"),
    (re.compile(r"(?P<module>.+)\.lora_B(\.default)?\.weight"), "B"),
    (re.compile(r"(?P<module>.+)\.lora_B(\.default)?\.bias"), "bias"),
    (re.compile(r"(?P<module>.+)\.lora_magnitude_vector(\.default)?(\.weight)?"), "magnitude"),
    (re.compile(r"(?P<module>.+)\.lora_embedding_A(\.default)?"), "embedding A"),
    (re.compile(r"(?P<module>.+)\.lora_embedding_B(\.default)?"), "embedding B"),
    (re.compile(r"(?P<module>.+)\.token_adapter\.trainable_tokens_delta(\.default)?"), "tokens"),
    (re.compile(r"(?P<module>.+?)(\.base_layer)?\.weight"), "replaced"),
    (re.compile(r"(?P<module>.+?)(\.base_layer)?\.bias"), "replaced bias"),
)
"""Names of tensors after the prefix, and which part of a module's change they are: the first that matches."""

_OF_LINEAR, _OF_EMBEDDING = ("A", "B", "bias", "magnitude"), ("embedding A", "embedding B")
_WHOLE, _TOKENS = ("replaced", "replaced bias"), ("tokens",)


@dataclass
class _Changed:
    """The parts of the change of a base tensor. `module` is the path in the file of the module that has the tensor."""

    module: str
    parts: dict[str, Tensor] = field(default_factory=dict)


def read_adapter(
    folder: Path, shapes: Mapping[str, tuple[int, int]], *, max_rank: int,
    others: Mapping[str, tuple[int, ...]] | None = None,
) -> Adapter:  # fmt: skip
    """Read an adapter of a base model whose linear layers have the weights `shapes`, [outputs, inputs] by name.

    `others` are further tensors of the base that it may change: the embedding, biases and norms (`linear_shapes` and
    `other_shapes`). Raises ModelError for an adapter that is damaged, of another base model, above `max_rank`, or that
    asks for what is not supported.
    """
    if is_missing(folder / CONFIG):
        raise ModelError(f"{folder} has no {CONFIG}; give a folder that PEFT's save_pretrained has written")
    config = read_peft_config(folder, max_rank)
    path = folder / _TENSORS
    if is_missing(path):
        raise ModelError(f"{folder} has no {_TENSORS}" + _instead(folder))
    file = parse_safetensors(path, read_file(path, {**(others or {}), **shapes}, max_rank), MOST_TENSORS)
    unknown = [f"{name} of type {dtype}" for name, dtype in file.foreign.items()]
    return _PeftReader(path, config, shapes, others or {}).read(file.tensors, unknown)


def _instead(folder: Path) -> str:
    if is_missing(folder / _PICKLE):
        return "; give a folder that PEFT's save_pretrained has written"
    convert = (
        f"import torch, safetensors.torch as s; t = torch.load('{_PICKLE}', weights_only=True); "
        f"s.save_file({{name: x.contiguous() for name, x in t.items()}}, '{_TENSORS}')"
    )
    return f'; it has {_PICKLE}, which is a program to run: convert it there by `python -c "{convert}"`'


class _PeftReader:
    def __init__(
        self,
        path: Path,
        config: PeftConfig,
        shapes: Mapping[str, tuple[int, int]],
        others: Mapping[str, tuple[int, ...]],
    ) -> None:
        self._path, self._config = path, config
        self._linear = shapes
        self._shapes: dict[str, tuple[int, ...]] = {**others, **shapes}
        self._names = BaseNames(self._shapes)

    def read(self, tensors: Mapping[str, Tensor], unknown: list[str]) -> Adapter:
        """Return the adapter that has these tensors; those `unknown` are rejected, as are others without a meaning."""
        changes: dict[str, _Changed] = {}
        unknown += [tensor.name for tensor in tensors.values() if not self._enter(changes, tensor)]
        if unknown:
            raise ModelError(
                f"{self._path} has {len(unknown)} tensors that are not of this base model, or not supported: "
                f"{', '.join(sorted(unknown)[:MOST_NAMED])}; give an adapter of this base model, of its linear layers"
            )
        if not changes:
            raise ModelError(f"{self._path} has no tensors; save the adapter again, from all ranks of its training")
        with_parts = {
            parts: {name: change for name, change in changes.items() if not change.parts.keys().isdisjoint(parts)}
            for parts in (_OF_LINEAR, _OF_EMBEDDING, _WHOLE, _TOKENS)
        }
        if self._config.tokens and not with_parts[_TOKENS]:
            raise ModelError(
                f"{self._path} lacks the rows of the trainable_token_indices of {CONFIG}; save the adapter again"
            )
        return Adapter(
            {name: self._layer(name, change) for name, change in with_parts[_OF_LINEAR].items()},
            {name: self._embedding(name, change) for name, change in with_parts[_OF_EMBEDDING].items()},
            {name: self._replaced(name, change) for name, change in with_parts[_WHOLE].items()},
            {name: self._tokens(name, change) for name, change in with_parts[_TOKENS].items()},
        )

    def _enter(self, changes: dict[str, _Changed], tensor: Tensor) -> bool:
        """Enter a tensor of the file; return False for one that has no meaning."""
        given = tensor.name.removeprefix(_PREFIX)
        matches = ((pattern.fullmatch(given), part) for pattern, part in _FORMS)
        match, part = next(((match, part) for match, part in matches if match is not None), (None, ""))
        if match is None:
            return False
        module = match["module"]
        name = self._names.find(self._path, f"{module}.{'bias' if part == 'replaced bias' else 'weight'}")
        if name is None or not self._may_have(name, part):
            return False
        change = changes.setdefault(name, _Changed(module))
        if change.module != module or part in change.parts:
            raise ModelError(
                f"{self._path} changes {name} of the base model twice, by {change.module} and {tensor.name}; remove one"
            )
        change.parts[part] = tensor
        return True

    def _may_have(self, name: str, part: str) -> bool:
        """Return whether a tensor of the base can have a part."""
        if part in _OF_LINEAR:
            return name in self._linear
        if part in _OF_EMBEDDING:
            return name not in self._linear and len(self._shapes[name]) == 2
        return part not in _TOKENS or len(self._shapes[name]) == 2

    def _layer(self, name: str, change: _Changed) -> LowRank:
        module, parts, config = change.module, change.parts, self._config
        for part, is_wanted, option in (
            ("A", True, ""), ("B", True, ""), ("bias", config.lora_bias, "lora_bias"),
            ("magnitude", config.use_dora, "use_dora"),
        ):  # fmt: skip
            if (part in parts) != is_wanted:
                raise self._incomplete(module, part, is_wanted, option)
        (outputs, inputs), rank = self._linear[name], config.rank_of(module)
        scale = config.scale_of(module, rank)
        a = self._checked(parts["A"], (rank, inputs), name, rank)
        b = self._checked(parts["B"], (outputs, rank), name, rank)
        bias = magnitude = None
        if config.lora_bias:
            bias = scaled(self._path, self._checked(parts["bias"], (outputs,), name, rank), scale)
        if config.use_dora:
            magnitude = self._checked(parts["magnitude"], (outputs,), name, rank).to_f32()
        return LowRank(a, b, scale, bias, magnitude)

    def _embedding(self, name: str, change: _Changed) -> LowRank:
        for part in _OF_EMBEDDING:
            if part not in change.parts:
                raise self._incomplete(change.module, part, True)
        if self._config.use_dora:  # of embeddings, whose magnitudes are rejected
            raise self._incomplete(change.module, "magnitude", True, "use_dora")
        (vocabulary, hidden), rank = self._shapes[name], self._config.rank_of(change.module)
        a = self._checked(change.parts["embedding A"], (rank, vocabulary), name, rank)
        b = self._checked(change.parts["embedding B"], (hidden, rank), name, rank)
        return LowRank(a, b, self._config.scale_of(change.module, rank))

    def _replaced(self, name: str, change: _Changed) -> Tensor:
        if self._config.fan_in_fan_out and name in self._linear and name != HEAD:
            raise ModelError(
                f"{self._path} replaces {name}, but {CONFIG} has fan_in_fan_out, so that it may be transposed; train "
                "without it among modules_to_save"
            )
        tensor = change.parts.get("replaced") or change.parts["replaced bias"]
        return checked(self._path, tensor, self._shapes[name], f"{name} of the base model")

    def _tokens(self, name: str, change: _Changed) -> TokenRows:
        tokens, (vocabulary, hidden) = self._config.tokens_of(change.module), self._shapes[name]
        if max(tokens) >= vocabulary:
            raise ModelError(
                f"{self._config.path}: trainable_token_indices has token {max(tokens)}, but {name} of the base model "
                f"has {vocabulary} rows; give an adapter of this base model"
            )
        reason = f"{name} of the base model with {len(tokens)} trainable_token_indices"
        return TokenRows(tokens, checked(self._path, change.parts["tokens"], (len(tokens), hidden), reason))

    def _checked(self, tensor: Tensor, shape: tuple[int, ...], name: str, rank: int) -> Tensor:
        reason = f"rank {rank} of {CONFIG} with {name} {list(self._shapes[name])} of the base model"
        return checked(self._path, tensor, shape, reason)

    def _incomplete(self, module: str, part: str, is_wanted: bool, option: str = "") -> ModelError:
        """Return the error for a module that lacks a part, or has one that it may not have."""
        has = "lacks" if is_wanted else "has"
        because = f" where {CONFIG} has {option} {str(is_wanted).lower()}" if option else ""
        return ModelError(f"{self._path} {has} the part {part} of {module}{because}; save the adapter again")
