"""Adapters in the folders that PEFT writes: adapter_config.json, and adapter_model.safetensors.

Tensors are `base_model.model.PATH.lora_A.weight` and so on, where PATH is that of the module in the model that was
trained. Each has a meaning here, or the adapter is rejected: one that is left out would change the results silently.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from quire.kernels.adapters.adapter import Adapter, LowRank, TokenRows
from quire.kernels.adapters.changeable import Changeable, unchangeable
from quire.kernels.adapters.files import AdapterFile, StoredTensor
from quire.kernels.adapters.names import BaseNames
from quire.kernels.adapters.peft_config import CONFIG, PeftConfig, read_peft_config
from quire.kernels.adapters.safetensors_header import read_header
from quire.kernels.adapters.shapes import HEAD
from quire.kernels.adapters.tensors import MOST_NAMED, check_form, is_missing, loaded, most_tensors, scaled
from quire.kernels.errors import ModelError
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
    parts: dict[str, StoredTensor] = field(default_factory=dict)


def read_adapter(
    folder: Path, shapes: Mapping[str, tuple[int, int]], *, max_rank: int,
    others: Mapping[str, tuple[int, ...]] | None = None, changeable: Changeable | None = None,
) -> Adapter:  # fmt: skip
    """Read an adapter of a base model whose linear layers have the weights `shapes`, [outputs, inputs] by name.

    `others` are further tensors of the base that it may change: the embedding, biases and norms (`linear_shapes` and
    `other_shapes`). With `changeable` it may change only these of them, and whole tensors that are as in the base are
    left out. Raises ModelError for an adapter that is damaged, of another base model, above `max_rank`, or that asks
    for what is not supported; data is read only once names, ranks and shapes are known to be right.
    """
    if is_missing(folder / CONFIG):
        raise ModelError(f"{folder} has no {CONFIG}; give a folder that PEFT's save_pretrained has written")
    config = read_peft_config(folder, max_rank)
    path = folder / _TENSORS
    if is_missing(path):
        raise ModelError(f"{folder} has no {_TENSORS}" + _instead(folder))
    with AdapterFile(path) as file:
        tensors, unknown = read_header(file, most_tensors({**(others or {}), **shapes}))
        return _PeftReader(file, config, shapes, others or {}, changeable).read(tensors, unknown)


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
        file: AdapterFile,
        config: PeftConfig,
        shapes: Mapping[str, tuple[int, int]],
        others: Mapping[str, tuple[int, ...]],
        changeable: Changeable | None,
    ) -> None:
        self._file, self._path, self._config = file, file.path, config
        self._linear = shapes
        self._shapes: dict[str, tuple[int, ...]] = {**others, **shapes}
        self._names = BaseNames(self._shapes)
        self._changeable = changeable

    def read(self, tensors: Sequence[StoredTensor], unknown: list[str]) -> Adapter:
        """Return the adapter that has these tensors; those `unknown` are rejected, as are others without a meaning."""
        changes: dict[str, _Changed] = {}
        unknown += [tensor.name for tensor in tensors if not self._enter(changes, tensor)]
        if unknown:
            raise ModelError(
                f"{self._path} has {len(unknown)} tensors that are not of this base model, or not supported: "
                f"{', '.join(heapq.nsmallest(MOST_NAMED, unknown))}; give an adapter of this base model, of its "
                "linear layers"
            )
        if not changes:
            raise ModelError(f"{self._path} has no tensors; save the adapter again, from all ranks of its training")
        if self._config.tokens and not any("tokens" in change.parts for change in changes.values()):
            raise ModelError(
                f"{self._path} lacks the rows of the trainable_token_indices of {CONFIG}; save the adapter again"
            )
        for name, change in changes.items():
            self._check(name, change)
        if self._changeable is not None:
            self._check_changeable(changes, self._changeable)
        return self._load(changes)

    def _load(self, changes: Mapping[str, _Changed]) -> Adapter:
        """Read the data of checked changes."""
        layers, embeddings, replaced, tokens = {}, {}, {}, {}
        for name, change in changes.items():
            parts, config = change.parts, self._config
            if "A" in parts:
                layers[name] = self._layer(change, config.scale_of(change.module, parts["A"].shape[0]))
            if "embedding A" in parts:
                a, b = self._loaded(change, "embedding A"), self._loaded(change, "embedding B")
                embeddings[name] = LowRank(a, b, config.scale_of(change.module, a.shape[0]))
            whole = next((part for part in _WHOLE if part in parts), None)
            if whole is not None and self._changeable is None:
                replaced[name] = self._loaded(change, whole)
            if "tokens" in parts:
                tokens[name] = TokenRows(config.tokens_of(change.module), self._loaded(change, "tokens"))
        return Adapter(layers, embeddings, replaced, tokens)

    def _enter(self, changes: dict[str, _Changed], tensor: StoredTensor) -> bool:
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

    def _check(self, name: str, change: _Changed) -> None:
        """Raise ModelError unless a change has all of its parts, in the shapes of the base."""
        if not change.parts.keys().isdisjoint(_OF_LINEAR):
            self._check_layer(name, change)
        if not change.parts.keys().isdisjoint(_OF_EMBEDDING):
            self._check_embedding(name, change)
        for part in _WHOLE:
            if part in change.parts:
                self._check_whole(name, change.parts[part])
        if "tokens" in change.parts:
            self._check_tokens(name, change)

    def _check_layer(self, name: str, change: _Changed) -> None:
        config = self._config
        for part, is_wanted, option in (
            ("A", True, ""), ("B", True, ""), ("bias", config.lora_bias, "lora_bias"),
            ("magnitude", config.use_dora, "use_dora"),
        ):  # fmt: skip
            if (part in change.parts) != is_wanted:
                raise self._incomplete(change.module, part, is_wanted, option)
        (outputs, inputs), rank = self._linear[name], config.rank_of(change.module)
        self._check_forms(name, change, rank, {
            "A": (rank, inputs), "B": (outputs, rank), "bias": (outputs,), "magnitude": (outputs,),
        })  # fmt: skip

    def _check_embedding(self, name: str, change: _Changed) -> None:
        for part in _OF_EMBEDDING:
            if part not in change.parts:
                raise self._incomplete(change.module, part, True)
        if self._config.use_dora:  # of embeddings, whose magnitudes are rejected
            raise self._incomplete(change.module, "magnitude", True, "use_dora")
        (vocabulary, hidden), rank = self._shapes[name], self._config.rank_of(change.module)
        self._check_forms(name, change, rank, {"embedding A": (rank, vocabulary), "embedding B": (hidden, rank)})

    def _check_forms(self, name: str, change: _Changed, rank: int, shapes: Mapping[str, tuple[int, ...]]) -> None:
        reason = f"rank {rank} of {CONFIG} with {name} {list(self._shapes[name])} of the base model"
        for part, shape in shapes.items():
            if part in change.parts:
                check_form(self._path, change.parts[part], shape, reason)

    def _check_whole(self, name: str, tensor: StoredTensor) -> None:
        if self._config.fan_in_fan_out and name in self._linear and name != HEAD:
            raise ModelError(
                f"{self._path} replaces {name}, but {CONFIG} has fan_in_fan_out, so that it may be transposed; train "
                "without it among modules_to_save"
            )
        check_form(self._path, tensor, self._shapes[name], f"{name} of the base model")

    def _check_tokens(self, name: str, change: _Changed) -> None:
        tokens, (vocabulary, hidden) = self._config.tokens_of(change.module), self._shapes[name]
        if max(tokens) >= vocabulary:
            raise ModelError(
                f"{self._config.path}: trainable_token_indices has token {max(tokens)}, but {name} of the base model "
                f"has {vocabulary} rows; give an adapter of this base model"
            )
        reason = f"{name} of the base model with {len(tokens)} trainable_token_indices"
        check_form(self._path, change.parts["tokens"], (len(tokens), hidden), reason)

    def _check_changeable(self, changes: Mapping[str, _Changed], changeable: Changeable) -> None:
        """Raise ModelError, with the field of the config that asks for it, for a change of what may not be changed."""
        config, whole = self._config.path, []
        for name, change in changes.items():
            for part, tensor in change.parts.items():
                if part in _TOKENS:
                    raise unchangeable(f"{config}: trainable_token_indices changes rows of {name}")
                if part in _OF_EMBEDDING or (part in _OF_LINEAR and name not in changeable.layers):
                    raise unchangeable(f"{config}: target_modules changes {name}")
                if part in _WHOLE:
                    whole.append((name, part, tensor))
        for name, part, tensor in whole:  # last, since they are read
            if not changeable.is_same(self._file, tensor, name):
                field_ = "bias" if part == "replaced bias" else "modules_to_save"
                raise unchangeable(f"{config}: {field_} replaces {name} of the base model by {tensor.name}")

    def _layer(self, change: _Changed, scale: float) -> LowRank:
        """Read the change of a linear layer."""
        bias = magnitude = None
        if "bias" in change.parts:
            bias = scaled(self._path, self._loaded(change, "bias"), scale)
        if "magnitude" in change.parts:
            magnitude = self._loaded(change, "magnitude").to_f32()
        return LowRank(self._loaded(change, "A"), self._loaded(change, "B"), scale, bias, magnitude)

    def _loaded(self, change: _Changed, part: str) -> Tensor:
        return loaded(self._file, change.parts[part])

    def _incomplete(self, module: str, part: str, is_wanted: bool, option: str = "") -> ModelError:
        """Return the error for a module that lacks a part, or has one that it may not have."""
        has = "lacks" if is_wanted else "has"
        because = f" where {CONFIG} has {option} {str(is_wanted).lower()}" if option else ""
        return ModelError(f"{self._path} {has} the part {part} of {module}{because}; save the adapter again")
