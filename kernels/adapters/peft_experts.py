"""Changes of stacked experts, which PEFT writes for `target_parameters`, taken apart into those of each expert.

The parameters of a module are wrapped one around the other, so that a file has `experts.lora_A`, of the outer one, and
`experts.base_layer.lora_A`; their shapes tell which is that of gates and ups, and which that of downs. A is
[experts * rank, inputs], and B [outputs, rank * experts], with the experts in turns.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from quire.kernels.adapters.adapter import LowRank
from quire.kernels.adapters.files import AdapterFile, StoredTensor
from quire.kernels.adapters.names import BaseNames
from quire.kernels.adapters.peft_config import CONFIG, PeftConfig
from quire.kernels.adapters.tensors import check_form, loaded
from quire.kernels.errors import ModelError
from quire.kernels.weights.tensor import Tensor

_TENSOR = re.compile(r"(?P<module>.+?)(?P<wraps>(\.base_layer)*)\.lora_(?P<half>[AB])(\.default)?\.weight")
_FIRST = ".0.up_proj.weight"


@dataclass(frozen=True)
class _Layers:
    """The layers of each expert that are stacked in one parameter: their parts of a name, as rows of its outputs."""

    parameter: str
    parts: tuple[str, ...]
    outputs: int
    inputs: int
    is_interleaved: bool = False

    def rows(self, part: str) -> slice:
        """Return the outputs of a part."""
        number, count = self.parts.index(part), len(self.parts)
        if self.is_interleaved:
            return slice(number, None, count)
        size = self.outputs // count
        return slice(number * size, (number + 1) * size)


@dataclass
class _Stacked:
    """The halves of a change of experts, which the base names `at`."""

    at: str
    module: str
    halves: dict[str, StoredTensor] = field(default_factory=dict)


class StackedExperts:
    """The changes of stacked experts in a file."""

    def __init__(self, path: Path, config: PeftConfig, shapes: Mapping[str, tuple[int, ...]], names: BaseNames) -> None:
        self._path, self._config, self._shapes, self._names = path, config, shapes, names
        self._found: dict[tuple[str, str], _Stacked] = {}  # by module, and by what wraps it

    def __bool__(self) -> bool:
        return bool(self._found)

    def enter(self, name: str, tensor: StoredTensor) -> bool:
        """Enter a tensor of the file, by its name without prefix; return False for one that is of no experts."""
        match = _TENSOR.fullmatch(name)
        if match is None or not self._config.has_parameters:
            return False
        first = self._names.find(self._path, f"{match['module']}{_FIRST}")
        if first is None:
            return False
        key = match["module"], match["wraps"]
        stacked = self._found.setdefault(key, _Stacked(first.removesuffix(_FIRST), match["module"]))
        stacked.halves[match["half"]] = tensor
        return True

    def check(self) -> list[str]:
        """Return the names of all layers that are changed. Raises ModelError for changes in other shapes."""
        names = [name for stacked in self._found.values() for name, _, _ in self._layers(stacked)]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ModelError(f"{self._path} changes {twice} of the base model twice; remove one")
        return names

    def load(self, file: AdapterFile) -> dict[str, LowRank]:
        """Read the changes of all layers."""
        found = {}
        for stacked in self._found.values():
            a, b = (loaded(file, stacked.halves[half]) for half in "AB")
            layers = self._stack(stacked)
            count = self._count(stacked.at)
            rank = a.shape[0] // count
            scale = self._config.scale_of(f"{stacked.module}.{layers.parameter}", rank)
            kind = np.uint32 if b.format == "f32" else np.uint16
            by_expert = b.stored.view(kind).reshape(layers.outputs, rank, count)
            for name, part, expert in self._layers(stacked):
                own = np.ascontiguousarray(by_expert[layers.rows(part), :, expert])
                own_b = Tensor(b.name, b.format, own.shape[:2], own.reshape(-1).view(np.uint8))
                found[name] = LowRank(a.rows(expert * rank, rank), own_b, scale)
        return found

    def _layers(self, stacked: _Stacked) -> Iterator[tuple[str, str, int]]:
        """Yield the names of layers, each with its part and its expert."""
        for expert in range(self._count(stacked.at)):
            for part in self._stack(stacked).parts:
                yield f"{stacked.at}.{expert}.{part}.weight", part, expert

    def _count(self, at: str) -> int:
        count = 0
        while f"{at}.{count}.up_proj.weight" in self._shapes:
            count += 1
        return count

    def _stack(self, stacked: _Stacked) -> _Layers:
        """Return the layers that a change is of. Raises ModelError unless it has their shapes."""
        for half in "AB":
            if half not in stacked.halves:
                raise ModelError(f"{self._path} lacks the part {half} of {stacked.module}; save the adapter again")
        a, b = (stacked.halves[half] for half in "AB")
        gates, downs = self._stacks(stacked.at)
        is_down = a.shape[-1:] == (downs.inputs,) and b.shape[:1] == (downs.outputs,)
        layers, count = downs if is_down else gates, self._count(stacked.at)
        rank = self._config.rank_of(f"{stacked.module}.{layers.parameter}")
        reason = f"rank {rank} of {CONFIG} with the {layers.parameter} of {count} experts of {stacked.at}"
        check_form(self._path, a, (count * rank, layers.inputs), reason)
        check_form(self._path, b, (layers.outputs, rank * count), reason)
        return layers

    def _stacks(self, at: str) -> tuple[_Layers, _Layers]:
        """Return the layers of the two stacks of experts."""
        inner, hidden = self._shapes[f"{at}{_FIRST}"]
        has_biases, has_gates = f"{at}.0.up_proj.bias" in self._shapes, f"{at}.0.gate_proj.weight" in self._shapes
        parts = ("gate_proj", "up_proj") if has_gates else ("up_proj",)
        fused = "gate_up_proj" if has_gates else "up_proj"
        gates = _Layers(fused, parts, len(parts) * inner, hidden, is_interleaved=has_biases)  # as in gpt-oss
        return gates, _Layers("down_proj", ("down_proj",), hidden, inner)
