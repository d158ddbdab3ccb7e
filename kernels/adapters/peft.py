"""Adapters in the folders that PEFT writes: adapter_config.json, and adapter_model.safetensors.

Tensors are `base_model.model.PATH.lora_A.weight` and so on, where PATH is that of the module in the model that was
trained. Each has a meaning here, or the adapter is rejected: one that is left out would change the results silently.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Container, Iterator, Mapping, Sequence
from pathlib import Path

from quire.kernels.adapters.adapter import Adapter, LowRank, TokenRows
from quire.kernels.adapters.changeable import Changeable, unchangeable
from quire.kernels.adapters.files import AdapterFile, StoredTensor
from quire.kernels.adapters.names import BaseNames
from quire.kernels.adapters.peft_config import CONFIG, PeftConfig, read_peft_config
from quire.kernels.adapters.peft_experts import StackedExperts
from quire.kernels.adapters.peft_parts import FORMS, OF_EMBEDDING, OF_LINEAR, TOKENS, WHOLE, Changed, PeftChecks
from quire.kernels.adapters.safetensors_header import read_header
from quire.kernels.adapters.tensors import MOST_NAMED, is_missing, loaded, most_tensors, scaled
from quire.kernels.errors import ModelError, quoted
from quire.kernels.weights.tensor import Tensor

_TENSORS, _PICKLE = "adapter_model.safetensors", "adapter_model.bin"
_PREFIX = "base_model.model."
_TRAINED_TWICE = ".token_adapter.base_layer"
_CLASSIFIER = re.compile(r"(score|classifier)(\..+)?\.(weight|bias)")


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
        tensors = read_header(file, most_tensors({**(others or {}), **shapes}))
        return _PeftReader(file, config, shapes, others or {}, changeable).read(tensors)


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
        self._checks = PeftChecks(file.path, config, shapes, {**others, **shapes})
        self._names = BaseNames(self._checks.shapes)
        self._experts = StackedExperts(file.path, config, self._checks.shapes, self._names)
        self._changeable = changeable

    def read(self, tensors: Sequence[StoredTensor]) -> Adapter:
        """Return the adapter that has these tensors; those without a meaning are rejected."""
        changes: dict[str, Changed] = {}
        unknown = [tensor.name for tensor in tensors if not self._enter(changes, tensor)]
        if unknown:
            self._check_modules(unknown)
            raise ModelError(
                f"{self._path} has {len(unknown)} tensors that are not of this base model, or not supported: "
                f"{', '.join(heapq.nsmallest(MOST_NAMED, unknown))}; give an adapter of this base model"
            )
        if not changes and not self._experts:
            raise ModelError(f"{self._path} has no tensors; save the adapter again, from all ranks of its training")
        if self._config.tokens and not any("tokens" in change.parts for change in changes.values()):
            raise ModelError(
                f"{self._path} lacks the rows of the trainable_token_indices of {CONFIG}; save the adapter again"
            )
        self._check_saved(changes)
        for name, change in changes.items():
            self._checks.check(name, change)
        self._check_experts(changes)
        whole = {name for name, _, _ in _whole_tensors(changes)}
        if self._changeable is not None:
            whole = self._replaced(changes, self._changeable)
            self._check_memory(changes, whole, self._changeable)
        return self._load(changes, whole)

    def _check_memory(self, changes: Mapping[str, Changed], whole: Container[str], changeable: Changeable) -> None:
        """Raise MemoryShortageError unless there is memory for all that `_load` reads."""
        read = [
            tensor
            for name, change in changes.items()
            for part, tensor in change.parts.items()
            if part not in WHOLE or name in whole
        ]
        changeable.check_memory(self._file, [*read, *self._experts.tensors()], self._experts.copied_bytes)

    def _load(self, changes: Mapping[str, Changed], whole_names: Container[str]) -> Adapter:
        """Read the data of checked changes, with the whole tensors of these names."""
        layers, embeddings, replaced, tokens = self._experts.load(self._file), {}, {}, {}
        for name, change in changes.items():
            parts, config = change.parts, self._config
            if "A" in parts:
                layers[name] = self._layer(change, config.scale_of(change.module, parts["A"].shape[0]))
            if "embedding A" in parts:
                a, b = self._loaded(change, "embedding A"), self._loaded(change, "embedding B")
                embeddings[name] = LowRank(a, b, config.scale_of(change.module, a.shape[0]))
            whole = next((part for part in WHOLE if part in parts), None)
            if whole is not None and name in whole_names:
                replaced[name] = self._loaded(change, whole)
            if "tokens" in parts:
                tokens[name] = TokenRows(config.tokens_of(change.module), self._loaded(change, "tokens"))
        return Adapter(layers, embeddings, replaced, tokens)

    def _enter(self, changes: dict[str, Changed], tensor: StoredTensor) -> bool:
        """Enter a tensor of the file; return False for one that has no meaning."""
        given = tensor.name.removeprefix(_PREFIX)
        matches = ((pattern.fullmatch(given), part) for pattern, part in FORMS)
        match, part = next(((match, part) for match, part in matches if match is not None), (None, ""))
        module = "" if match is None else match["module"]
        name = self._names.find(self._path, f"{module}.{'bias' if part == 'replaced bias' else 'weight'}")
        if name is None or not self._checks.may_have(name, part):
            return self._experts.enter(given, tensor)
        change = changes.setdefault(name, Changed(module))
        if change.module != module or part in change.parts:
            raise ModelError(
                f"{self._path} changes {name} of the base model twice, by {change.module} and {tensor.name}; remove one"
            )
        change.parts[part] = tensor
        return True

    def _check_modules(self, unknown: Sequence[str]) -> None:
        """Raise ModelError for what `modules_to_save` may ask for and the base model, or PEFT, does not have."""
        for name in unknown:
            if _TRAINED_TWICE in name:
                module = name.removeprefix(_PREFIX).partition(_TRAINED_TWICE)[0]
                raise ModelError(
                    f"{self._config.path}: modules_to_save and trainable_token_indices both change {quoted(module)}, "
                    "which PEFT can't compute either; train it with one of the two"
                )
            if _CLASSIFIER.fullmatch(name.removeprefix(_PREFIX)):
                raise ModelError(
                    f"{self._config.path}: modules_to_save has {quoted(name)}, the head of a classification, and the "
                    "base model has no such head; give it to a checkpoint of its ...ForSequenceClassification"
                )

    def _check_saved(self, changes: Mapping[str, Changed]) -> None:
        """Raise ModelError for modules of the base model that `modules_to_save` names, and the file lacks.

        It may name modules that the base does not have: PEFT enters each name that the head of a classification has.
        """
        saved = [f".{change.module}" for change in changes.values() if not change.parts.keys().isdisjoint(WHOLE)]
        missing = [given for given in self._config.saved if not any(module.endswith(f".{given}") for module in saved)]
        ends = tuple(f".{given}.weight" for given in missing)
        lacked = next((name for name in self._checks.shapes if f".{name}".endswith(ends)), None)
        if lacked is not None:
            raise ModelError(
                f"{self._path} lacks {lacked}, which modules_to_save of {CONFIG} names; save the adapter again, or "
                "remove the name if it was not trained"
            )

    def _check_experts(self, changes: Mapping[str, Changed]) -> None:
        """Raise ModelError for changes of stacked experts that can't be."""
        for name in self._experts.check():
            if name in changes:
                raise ModelError(f"{self._path} changes {name} of the base model twice; remove one")
            if self._changeable is not None and name not in self._changeable.layers:
                raise unchangeable(f"{self._config.path}: target_parameters changes {name}")

    def _replaced(self, changes: Mapping[str, Changed], changeable: Changeable) -> set[str]:
        """Return the names of whole tensors that are not as in the base.

        Raises ModelError, with the field of the config that asks for it, for a change of what may not be changed.
        """
        config, found = self._config.path, set()
        for name, change in changes.items():
            for part in change.parts:
                if part in TOKENS and name not in changeable.rows:
                    raise unchangeable(f"{config}: trainable_token_indices changes rows of {name}")
                if (part in OF_EMBEDDING and name not in changeable.embeddings) or (
                    part in OF_LINEAR and name not in changeable.layers
                ):
                    raise unchangeable(f"{config}: target_modules changes {name}")
        for name, part, tensor in _whole_tensors(changes):  # last, since they are read
            if not changeable.is_same(self._file, tensor, name):
                if name not in changeable.whole:
                    field = "bias" if part == "replaced bias" else "modules_to_save"
                    raise unchangeable(f"{config}: {field} replaces {name} of the base model by {tensor.name}")
                found.add(name)
        return found

    def _layer(self, change: Changed, scale: float) -> LowRank:
        """Read the change of a linear layer."""
        bias = magnitude = None
        if "bias" in change.parts:
            bias = scaled(self._path, self._loaded(change, "bias"), scale)
        if "magnitude" in change.parts:
            magnitude = self._loaded(change, "magnitude").to_f32()
        return LowRank(self._loaded(change, "A"), self._loaded(change, "B"), scale, bias, magnitude)

    def _loaded(self, change: Changed, part: str) -> Tensor:
        return loaded(self._file, change.parts[part])


def _whole_tensors(changes: Mapping[str, Changed]) -> Iterator[tuple[str, str, StoredTensor]]:
    """Yield the whole tensors of a file, each with the name of the base's and its part."""
    for name, change in changes.items():
        yield from ((name, part, change.parts[part]) for part in WHOLE if part in change.parts)
