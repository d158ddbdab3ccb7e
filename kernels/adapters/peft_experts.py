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
    """The halves of a change of `count` experts, which the base names `at`, and once they are checked its `layers`."""

    at: str
    module: str
    count: int
    halves: dict[str, StoredTensor] = field(default_factory=dict)
    layers: _Layers | None = None

    def names(self, layers: _Layers) -> Iterator[tuple[str, str, int]]:
        """Yield the names of all layers, each with its part and its expert."""
        for expert in range(self.count):
            for part in layers.parts:
                yield f"{self.at}.{expert}.{part}.weight", part, expert


class StackedExperts:
    """The changes of stacked experts in a file."""

    def __init__(self, path: Path, config: PeftConfig, shapes: Mapping[str, tuple[int, ...]], names: BaseNames) -> None:
        self._path, self._config, self._shapes, self._names = path, config, shapes, names
        self._found: dict[tuple[str, str], _Stacked] = {}  # by module, and by what wraps it
        self._counts: dict[str, int] = {}  # of experts

    def __bool__(self) -> bool:
        return bool(self._found)

    def enter(self, name: str, tensor: StoredTensor) -> bool:
        """Enter a tensor of the file, by its name without prefix; return False for one that is of no experts."""
        match = _TENSOR.fullmatch(name)
        if match is None or not self._config.parameters:
            return False
        first = self._names.find(self._path, f"{match['module']}{_FIRST}")
        if first is None:
            return False
        key = match["module"], match["wraps"]
        if key not in self._found:
            at = first.removesuffix(_FIRST)
            if at not in self._counts:
                self._counts[at] = self._count(at)
            self._found[key] = _Stacked(at, match["module"], self._counts[at])
        halves = self._found[key].halves
        if match["half"] in halves:
            raise ModelError(
                f"{self._path} has the part {match['half']} of {match['module']} twice, as {tensor.name}; remove one"
            )
        halves[match["half"]] = tensor
        return True

    def check(self) -> list[str]:
        """Return the names of all layers that are changed. Raises ModelError for changes in other shapes, and for
        parameters that the config names and the file lacks."""
        for option in ("use_dora", "lora_bias"):
            if self._found and getattr(self._config, option):
                module = next(iter(self._found.values())).module
                raise ModelError(
                    f"{self._config.path}: {option} is true, and target_parameters has {module}, whose experts can't "
                    f"have it; train them without {option}"
                )
        known: dict[tuple[str, str], tuple[_Stacked, _Layers]] = {}  # all others have other names
        for stacked in self._found.values():
            stacked.layers = layers = self._layers(stacked)
            key = stacked.at, layers.parameter
            if key in known:
                raise ModelError(f"{self._path} changes {'.'.join(key)} of the base model twice; remove one")
            known[key] = stacked, layers
        if self._config.parameters:
            self._check_named({".".join(key) for key in known})
        return [name for stacked, layers in known.values() for name, _, _ in stacked.names(layers)]

    def _check_named(self, changed: set[str]) -> None:
        """Raise ModelError for a parameter of the base that `target_parameters` names, where none of its name is
        changed."""
        places = (name.removesuffix(_FIRST) for name in self._shapes if name.endswith(_FIRST))
        stacks = [f"{at}.{layers.parameter}" for at in places for layers in self._stacks(at)]
        for given in self._config.parameters:
            named = [name for name in stacks if f".{name}".endswith(f".{given}")]
            if named and changed.isdisjoint(named):
                raise ModelError(
                    f"{self._path} lacks changes of {named[0]}, which target_parameters of {CONFIG} names; save the "
                    "adapter again, or remove the name if it was not trained"
                )

    def tensors(self) -> Iterator[StoredTensor]:
        """Yield all tensors that `load` reads."""
        for stacked in self._found.values():
            yield from stacked.halves.values()

    @property
    def copied_bytes(self) -> int:
        """Bytes of the largest B, which `load` takes apart while it has it as a whole."""
        return max((stacked.halves["B"].num_bytes for stacked in self._found.values()), default=0)

    def load(self, file: AdapterFile) -> dict[str, LowRank]:
        """Read the changes of all layers, once they are checked."""
        found = {}
        for stacked in self._found.values():
            layers, count = stacked.layers, stacked.count
            assert layers is not None
            a, b = (loaded(file, stacked.halves[half]) for half in "AB")
            rank = a.shape[0] // count
            scale = self._config.scale_of(f"{stacked.module}.{layers.parameter}", rank)
            kind = np.uint32 if b.format == "f32" else np.uint16
            by_expert = b.stored.view(kind).reshape(layers.outputs, rank, count)
            for name, part, expert in stacked.names(layers):
                own = np.ascontiguousarray(by_expert[layers.rows(part), :, expert])
                own_b = Tensor(b.name, b.format, own.shape[:2], own.reshape(-1).view(np.uint8))
                found[name] = LowRank(a.rows(expert * rank, rank), own_b, scale)
        return found

    def _count(self, at: str) -> int:
        count = 0
        while f"{at}.{count}.up_proj.weight" in self._shapes:
            count += 1
        return count

    def _layers(self, stacked: _Stacked) -> _Layers:
        """Return the layers that a change is of. Raises ModelError unless it has their shapes."""
        for half in "AB":
            if half not in stacked.halves:
                raise ModelError(f"{self._path} lacks the part {half} of {stacked.module}; save the adapter again")
        a, b = (stacked.halves[half] for half in "AB")
        gates, downs = self._stacks(stacked.at)
        is_down = a.shape[-1:] == (downs.inputs,) and b.shape[:1] == (downs.outputs,)
        layers, count = downs if is_down else gates, stacked.count
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
